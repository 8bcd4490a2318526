"""Sizes and cost models of the Gluon kernels on Hopper, and the tuning of the shared kernel there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from attrs import frozen

from dsv4attn.backends._triton.tuning import DEFAULT, HOPPER, INTERPRETER, MOST_ROWS, Tuning
from dsv4attn.core.contract.backend import ChunkCost
from dsv4attn.core.model.geometry import LayerGeometry


@frozen
class WarpRoles:
    """Warps and registers of the roles of the Gluon kernel for one key format, and sizes of `combine_parts`.

    The roles share the 65,536 registers of a multiprocessor. The first role (scores) has four warps and the registers
    that the other roles leave.

    values: registers of a thread in the second role (values), which has four warps.
    produce: registers of a thread in the third role, which writes tiles of keys.
    producers: warps of the third role.
    fetch: registers of a thread in the fourth role, which has four warps and fetches the records that the third role
    decodes. 0: there is no fourth role.
    least: smallest number of tiles of a program.
    heads: heads of a program of `combine_parts`.
    parts: parts that a program of `combine_parts` loads together.
    warps: warps of a program of `combine_parts`. With 2 or 4 heads, 2, 4 or 8 parts, or 8 warps most calls are slower,
    up to 1.4 times the whole call (H200, torch 2.11, Triton 3.6, 2026-11-25).
    measured: see `Tuning`.
    """

    values: int = 224
    produce: int = 64
    producers: int = 8
    fetch: int = 0
    least: int = 1
    heads: int = 8
    parts: int = 2
    warps: int = 4

    measured: str = "not measured"

    @property
    def block(self) -> tuple[tuple[int, int], ...]:
        """(warps, registers of a thread) of each role. Registers are allocated in multiples of eight."""
        later_roles = [(4, self.values), (self.producers, self.produce), *([(4, self.fetch)] if self.fetch else [])]
        all_warps = 4 + sum(warps for warps, _ in later_roles)
        available = 65536 // (32 * all_warps) // 8 * 8 * all_warps
        first = (available - sum(warps * registers for warps, registers in later_roles)) // 4 // 8 * 8
        return (4, first), *later_roles


_ON = "H200, torch 2.11, Triton 3.6, 2026-11-22: dsv4attn bench"

V4_PAGES_ROLES = WarpRoles(
    produce=72,
    producers=4,
    fetch=56,
    measured="H200, torch 2.11, Triton 3.6, 2026-11-25, sums of kernel times of dsv4attn.compat.flash_mla: with 80 and "
    "48, or 88 and 40, 0 to 3 % slower",
)
"""Keys in V4's fp8 records."""
V41_PAGES_ROLES = WarpRoles(measured=f"{_ON} decode prefill")
"""Keys in V4.1's records."""
BF16_ROWS_ROLES = WarpRoles(values=216, produce=72, producers=4, measured=f"{_ON} prefill-rows")
"""Keys in bf16 rows."""
RAW_Q_ROLES = WarpRoles(
    values=216,
    produce=80,
    producers=4,
    measured="H100, torch 2.11, Triton 3.6, 2026-11-24: 72 and 80 registers of `produce` take the same time; with 72 "
    "it spills with Triton 3.9",
)
"""Keys in bf16 rows, with raw q: neither normalised nor rotated."""


def is_small(tokens: int, heads: int, width: int, programs: int) -> bool:
    """Whether the shared kernel is faster for a decode whose rows have at most `width` keys.

    programs: number of programs that run at once. The shared kernel is faster if each (tile of 64 keys, block of 64
    heads) has a program to itself, where combining counts as one more tile.
    Measured on an H200, torch 2.11, Triton 3.6, 2026-11-23: 59 decodes of 1 to 256 tokens, 8 to 128 heads, on V4's and
    V4.1's records. In 56 the choice is the faster kernel, in two it is 4 % slower, in one of 8 heads 8 %.
    """
    return tokens * -(-heads // 64) * (-(-width // 64) + 1) <= programs


US_PER_FURTHER_PROGRAM = 3.4
"""Microseconds that each further program of a multiprocessor adds to a decode of `kernels_small_decode`."""


@frozen
class TileSizes:
    """Sizes of a program of `kernels_small_decode`, and a model of the time of a decode, fitted to measured times.

    heads: heads of a program.
    keys: keys of a program's tile.
    start: microseconds of a decode that do not depend on its size.
    most: largest number of programs of a multiprocessor with which these sizes may be the fastest.
    """

    heads: int
    keys: int
    start: float
    most: int = 1

    def of_rows(self, widths: Sequence[int]) -> int:
        """Tiles of a row whose segments have index rows of these widths."""
        return sum(-(-width // self.keys) for width in widths)

    def programs(self, tokens: int, heads: int, widths: Sequence[int]) -> int:
        """Programs of a decode."""
        return tokens * -(-heads // self.heads) * self.of_rows(widths)

    def time(self, tokens: int, heads: int, widths: Sequence[int], units: int) -> float:
        """Microseconds of a decode, including the kernel that combines.

        units: number of multiprocessors.
        """
        further = US_PER_FURTHER_PROGRAM * ((self.programs(tokens, heads, widths) - 1) // units)
        return self.start + further + 0.00044 * tokens * heads * (1 + self.of_rows(widths))


TILE_SIZES = (
    TileSizes(heads=16, keys=64, start=9.8, most=4),
    TileSizes(heads=32, keys=64, start=10.8),
    TileSizes(heads=32, keys=128, start=14.2),
    TileSizes(heads=64, keys=128, start=16.3),
)
"""64 heads with 64 keys, and 16 heads with 128 keys, were never faster than the best of these sizes. With `most`
programs of each multiprocessor the partial results fill half of the memory that `Sm90Backend.scratch` requests."""


@lru_cache(maxsize=4096)
def tile_sizes_of(
    tokens: int, heads: int, widths: tuple[int, ...], units: int, groups: int | None = None
) -> TileSizes | None:
    """The fastest sizes for a decode; None if all sizes give too many programs, or the Gluon kernel on pages is faster.

    widths: width of the index rows of each segment.
    units: number of multiprocessors.
    groups: groups of rows that the Gluon kernel on pages would compute; None: each row is by itself there.
    Measured on an H200, torch 2.11, Triton 3.6, 2026-11-26: 97 decodes of 1 to 264 tokens, 8 to 128 heads and 128 to
    1,152 keys, on c128a layers the mean of rows of random lengths and of full ones. For 95 the choice is the fastest,
    for two it is at most 0.8 % slower.
    """
    tiles = sum(-(-width // 64) for width in widths)
    best = min(
        (sizes for sizes in TILE_SIZES if sizes.programs(tokens, heads, widths) <= units * sizes.most),
        key=lambda sizes: sizes.time(tokens, heads, widths, units),
        default=None,
    )
    pages = 19.3 + 0.134 * tiles + 0.0119 * tokens * -(-heads // 64) * tiles
    if groups is not None:
        # fitted to 64 groups of four rows, which took 50 us with 18 tiles, and 26 with 4
        pages = 19.3 + 0.134 * tiles + 0.0276 * groups * tiles
    return best if best is not None and best.time(tokens, heads, widths, units) < pages else None


@frozen
class FewHeadsSizes:
    """Sizes of a program of `kernels_few_heads`.

    columns: heads of a program.
    tiles: tiles of 64 keys of a program; 0 if a program attends a whole row.
    """

    columns: int
    tiles: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether a program attends a whole row, so that nothing is combined."""
        return self.tiles == 0

    @property
    def shift(self) -> int:
        """Powers of two by which a part has more than 128 keys."""
        return max(self.tiles - 1, 1).bit_length() - 1

    def parts(self, widths: Sequence[int]) -> int:
        """Programs of a row whose segments have index rows of these widths, for each block of columns."""
        return 1 if self.is_whole else sum(-(-width // (64 * self.tiles)) for width in widths)


@frozen
class FewHeadsCosts:
    """A model of the time of a call of `kernels_few_heads`, fitted to measured times in microseconds.

    columns: heads of a program.
    start, tile: of a decode of whole rows, and for each tile of a row.
    token_tile, token: for each token and tile, and for each token.
    part_start, part_tile: of a decode of parts of rows, and for each tile of a part.
    part_token_tile, token_part: for each token and tile, and for each token and part.
    prompt_start, prompt_token, prompt_token_tile: of a prompt.
    """

    columns: int
    start: float
    tile: float
    token_tile: float
    token: float
    part_start: float
    part_tile: float
    part_token_tile: float
    token_part: float
    prompt_start: float
    prompt_token: float
    prompt_token_tile: float

    def time(self, sizes: FewHeadsSizes, tokens: int, widths: Sequence[int], *, decode: bool) -> float:
        """Microseconds of a call, including the kernel that combines."""
        tiles = sum(-(-width // 64) for width in widths)
        alone = self.start + self.tile * tiles
        if sizes.is_whole and not decode:
            return max(alone, self.prompt_start + tokens * (self.prompt_token_tile * tiles + self.prompt_token))
        if sizes.is_whole:
            return alone + tokens * (self.token_tile * tiles + self.token)
        of_token = self.part_token_tile * tiles + self.token_part * sizes.parts(widths)
        return self.part_start + self.part_tile * sizes.tiles + tokens * of_token


FEW_HEADS = (
    FewHeadsCosts(
        8, start=5.3, tile=1.46, token_tile=0.0069, token=0.0157,
        part_start=7.4, part_tile=1.29, part_token_tile=0.0057, token_part=0.0154,
        prompt_start=5.1, prompt_token=0.011, prompt_token_tile=0.0089,
    ),
    FewHeadsCosts(
        16, start=6.25, tile=1.77, token_tile=0.0074, token=0.0246,
        part_start=8.3, part_tile=1.74, part_token_tile=0.0063, token_part=0.0233,
        prompt_start=5.9, prompt_token=0.0152, prompt_token_tile=0.0125,
    ),
)  # fmt: skip
TILES_OF_PARTS = (3, 6)
"""Tiles of a part of `kernels_few_heads`. With 2 and 4 calls were up to 18 % slower, or at most 4 % faster."""
US_OF_TRANSLATION = 1.5
"""Microseconds of a launch that translates entries of a few tokens into slots, in a replayed graph."""
PROGRAMS_OF_FEW_HEADS = 2
"""Programs of `kernels_few_heads` that a multiprocessor runs at once. Rows are in parts only if all run at once."""


def few_heads_costs(heads: int) -> FewHeadsCosts | None:
    """The model for ranks of so many heads; None for those that `kernels_few_heads` does not serve."""
    return next((costs for costs in FEW_HEADS if heads <= costs.columns), None)


@lru_cache(maxsize=4096)
def group_is_faster(heads: int, tokens: int, requests: int) -> bool:
    """Whether groups of rows of a request are faster than `kernels_few_heads`, which attends each row by itself.

    heads: query heads of a rank. tokens, requests: rows of the decode, and the requests that they belong to. On 64
    requests of 4 rows and 1,152 keys groups took 50.2 and 50.4 us with 8 and 16 heads, and rows by themselves take 61.6
    and 74.8 us (H200, torch 2.11, Triton 3.6, 2026-11-28, in two runs). Groups take that time with fewer rows too.
    """
    if heads > 16:
        return True
    return tokens >= (3.3 if heads <= 8 else 2.7) * requests


def few_heads_sizes_of(
    tokens: int, heads: int, widths: tuple[int, ...], units: int, *, decode: bool, reads_entries: bool = False
) -> FewHeadsSizes | None:
    """The fastest sizes of `kernels_few_heads`; None if another kernel is faster, or serves so many heads.

    widths: width of the index rows of each segment. units: number of multiprocessors. decode: whether the call is a
    decode, which `kernels_small_decode` may serve otherwise, and not a prompt on pages. reads_entries: whether that
    kernel reads entries, so that no launch translates them before.
    Measured on an H200, torch 2.11, Triton 3.6, 2026-11-28: 144 calls of 1 to 2,048 tokens, 8 and 16 heads, 128 to
    1,152 keys. The choice takes at most 7 % longer than the fastest way, and for 138 of them at most 3 %.
    """
    costs = few_heads_costs(heads)
    if costs is None:
        return None
    most = PROGRAMS_OF_FEW_HEADS * units
    parts = [FewHeadsSizes(costs.columns, tiles) for tiles in TILES_OF_PARTS]
    possible = [FewHeadsSizes(costs.columns), *(sizes for sizes in parts if tokens * sizes.parts(widths) <= most)]
    best = min(possible, key=lambda sizes: costs.time(sizes, tokens, widths, decode=decode))
    other = tile_sizes_of(tokens, heads, widths, units) if decode else None
    if other is None:
        tiles = sum(-(-width // 64) for width in widths)
        other_time = 12 + 0.49 * tiles + tokens * (0.0185 * tiles + 0.015)
    else:
        other_time = other.time(tokens, heads, widths, units)
    translated = US_OF_TRANSLATION if reads_entries else 0.0
    return best if costs.time(best, tokens, widths, decode=decode) + translated < other_time else None


MOST_BY_GROUPS = 32768
"""Entries of rows of which some are selected by groups whatever their number is."""
LONGEST_BY_GROUPS = 262_144
"""Entries of the longest rows that are selected by groups, K at most 1,024."""
REQUESTS_BY_GROUPS = 32
"""Smallest number of requests of one token each whose rows are selected by groups up to that length."""


def by_groups(tokens: int, requests: int, entries: int) -> bool:
    """Whether selection by groups is faster than selection in two steps.

    tokens, requests: of the call. entries: of the longest row, K at most 1,024.
    Measured on an H100, torch 2.11, Triton 3.6, 2026-11-28: 36 decodes of 1 to 64 requests, 8,192 to 262,144 entries;
    22 prompts of 128 to 2,048 tokens, 8,192 to 65,536 entries; K 512 and 1,024. With `in_one_launch`, the choice for a
    decode takes at most 3.5 % longer than the fastest way, and the choice for a prompt at most 2.5 %. Of prompts with
    rows of up to 8,192 entries, those of 2,048 tokens alone were measured.
    """
    if tokens <= requests:
        return entries <= MOST_BY_GROUPS or (tokens >= REQUESTS_BY_GROUPS and entries <= LONGEST_BY_GROUPS)
    return entries <= 8192 or (entries <= MOST_BY_GROUPS and tokens >= 256)


def is_listed(tokens: int, requests: int, entries: int) -> bool:
    """Whether the longest rows of a decode of one token a request are listed in parts, and shorter ones by groups.

    In a captured graph each row is then selected as its own length wants it. tokens, requests: of
    the call. entries: of the longest row. Where `by_groups` is true, programs select whole rows.
    """
    few = tokens < REQUESTS_BY_GROUPS or (entries > LONGEST_BY_GROUPS and tokens <= 64)
    return tokens <= requests and entries > MOST_BY_GROUPS and few


def in_one_launch(tokens: int, requests: int, entries: int, topk: int, units: int) -> bool:
    """Whether scores and selection of a prompt are faster in one launch than in two steps, and by groups.

    requests: of the call. entries: of the longest row. units: number of multiprocessors. A program of the launch has
    two tokens and all their keys, and a multiprocessor four programs, so that a launch takes as long as its last round
    of programs is full or not. With few entries to select the second of two steps takes little time, unless rows are
    long. With many to select, selection by groups is faster where it serves.
    Measured on an H100, torch 2.11, Triton 3.6, 2026-11-27: 32 prompts of 128 to 8,192 tokens, 2,048 to 65,536 entries,
    K 512 and 1,024, in two steps and in one launch; for the nine that are not selected by groups the choice is at most
    3 % slower than the better one. `by_groups` says which prompts were measured by groups too.
    """
    together = 8 * units
    filled = tokens / (-(-tokens // together) * together) if tokens else 0.0
    if topk > 512:
        return filled >= 0.7 and not by_groups(tokens, requests, entries)
    return filled >= 0.9 and entries >= 16384


COMBINE_ROUNDS = ((10, 1), (5, 2), (10, 2), (2, 8))
"""Of programs of `combine_tiles`: tiles of a round, and pieces of 64 columns. Measured with eight others, 75 decodes,
H200, torch 2.11, Triton 3.6, 2026-11-26: what `combine_rounds_of` says takes 1 % more than the fastest of twelve, at
most 5 %."""


def combine_rounds_of(tokens: int, heads: int, tiles: int) -> tuple[int, int]:
    """Tiles whose parts a program of `combine_tiles` loads together, and pieces of columns that it has.

    A multiprocessor runs four to eight programs at once. Where there would be more, few large programs are faster.
    """
    blocks = tokens * -(-heads // 8)
    if tiles <= 5:
        return COMBINE_ROUNDS[3] if tiles <= 2 and blocks > 64 else COMBINE_ROUNDS[1]
    return COMBINE_ROUNDS[2] if blocks >= 48 else COMBINE_ROUNDS[0]


PAGES_TUNING = Tuning(heads=64, keys=64)
"""Sizes of a tile of the Gluon kernel on pages."""
_SAMPLES = 16


@frozen
class PrefillCostModel:
    """A model of the time of a prefill chunk on pages and on gathered rows, fitted to measured times.

    All times are microseconds. A block is 64 heads.

    page: one tile of 64 keys, for one token and one block, on pages.
    page_token: one token and one block, on pages.
    page_list: one token, on pages.
    page_start: one chunk, on pages.
    row: one pair of tiles, for one token and one block, on rows.
    row_token: one token and one block, on rows.
    row_list: one token, on rows.
    gathered: one gathered row.
    row_start: one chunk, on rows.
    prepared: norm and rotation of q before attention, for one token and one block.
    raw_token: norm and rotation of q inside attention on rows, for one token and one block.
    raw_start: the same, for one chunk.
    group: one group of tokens of a request that are computed together, on pages.
    group_tile: one tile of 64 keys, for one group.
    group_start: one chunk of groups. group_length: the same, for each tile of a group.
    least: tokens of the shortest chunk that is gathered, and of the shortest step with raw q.
    """

    page: float = 0.0163
    page_token: float = 0.0208
    page_list: float = 0.00206
    page_start: float = 17.5
    row: float = 0.025
    row_token: float = 0.0199
    row_list: float = 0.00698
    gathered: float = 0.000489
    row_start: float = 24.3
    prepared: float = 0.0317
    raw_token: float = 0.0065
    raw_start: float = 3.0
    group: float = 0.0687
    group_tile: float = 0.0161
    group_start: float = 22.4
    group_length: float = 0.42
    least: int = 128

    measured: str = "not measured"

    def prefers_pages(
        self, layer: LayerGeometry, requests: Sequence[tuple[int, int]], rows: int, *, few_heads: bool = True
    ) -> bool:
        """Whether a chunk is faster on pages.

        requests: per request (tokens before the chunk, tokens in the chunk).
        rows: number of rows that are gathered for the chunk.
        few_heads: see `times`.
        """
        tokens = sum(count for _, count in requests)
        if tokens < self.least:
            return True
        page, row = self.times(layer, requests, rows, few_heads=few_heads)
        return page <= row

    def prefers_raw_q(self, layer: LayerGeometry, chunks: Sequence[ChunkCost], *, few_heads: bool = True) -> bool:
        """Whether a step is faster with raw q and all its chunks on rows.

        The alternative prepares q first, and attends each chunk on pages or rows, whichever is faster.
        """
        tokens = sum(count for requests, _ in chunks for _, count in requests)
        if tokens < self.least:
            return False
        work, raw, prepared = tokens * -(-layer.num_heads // 64), 0.0, 0.0
        for requests, rows in chunks:
            page, row = self.times(layer, requests, rows, few_heads=few_heads)
            raw += row + self.raw_start
            prepared += min(page, row)
        return raw + work * self.raw_token <= prepared + work * self.prepared

    def times(
        self, layer: LayerGeometry, requests: Sequence[tuple[int, int]], rows: int, *, few_heads: bool = True
    ) -> tuple[float, float]:
        """(microseconds on pages, microseconds on rows). A sample of tokens, spread evenly, stands for all tokens.

        few_heads: whether `kernels_few_heads` may serve pages. It serves V4's layers, which normalise q. Where it may
        not, tokens are not computed in groups either.
        """
        ends = [*accumulate(count for _, count in requests)]
        tokens, blocks = ends[-1], -(-layer.num_heads // 64)
        size = group_of_prompt(layer) if few_heads else 1
        tiles, tiles_of_groups, pairs = [], [], []
        for i in range(_SAMPLES):
            token = i * (tokens - 1) // (_SAMPLES - 1)
            request = bisect_right(ends, token)
            context, count = requests[request]
            seen = context + token - (ends[request] - count) + 1
            entries = layer.entries(seen)
            window, entries = min(seen, layer.window), min(entries, layer.topk) if layer.topk else entries
            tiles.append(-(-window // 64) - (-entries // 64))
            tiles_of_groups.append(-(-(window + size - 1) // 64) - (-entries // 64))
            pairs.append(-(-(window + entries) // 128))
        page = self._page_time(layer, tokens, sum(tiles) / _SAMPLES, few_heads=few_heads)
        if size > 1:
            page = min(page, self._group_time(tokens / size + len(requests) / 2, sum(tiles_of_groups) / _SAMPLES))
        row = tokens * blocks * (self.row * sum(pairs) / _SAMPLES + self.row_token)
        return page, row + tokens * self.row_list + rows * self.gathered + self.row_start

    def prefers_groups(
        self, layer: LayerGeometry, tokens: int, requests: int, widths: Sequence[int], *, few_heads: bool = True
    ) -> bool:
        """Whether tokens of a request are computed together faster than each by itself, in a chunk on pages.

        widths: of the index rows of each segment. few_heads: whether `kernels_few_heads` computes them by themselves.
        """
        size = group_of_prompt(layer)
        tiles, (window, *others) = sum(-(-width // 64) for width in widths), widths
        together = -(-(window + size - 1) // 64) - sum(-width // 64 for width in others)
        alone = self._page_time(layer, tokens, tiles, few_heads=few_heads)
        return size > 1 and self._group_time(tokens / size + requests / 2, together) < alone

    def _page_time(self, layer: LayerGeometry, tokens: int, tiles: float, *, few_heads: bool) -> float:
        """Microseconds on pages of tokens by themselves, each of so many tiles."""
        costs = few_heads_costs(layer.num_heads) if few_heads and layer.q_norm else None
        if costs is not None:
            return costs.prompt_start + tokens * (costs.prompt_token_tile * tiles + costs.prompt_token)
        work = tokens * -(-layer.num_heads // 64)
        return work * (self.page * tiles + self.page_token) + tokens * self.page_list + self.page_start

    def _group_time(self, groups: float, tiles: float) -> float:
        """Microseconds of groups, each of so many tiles."""
        return self.group_start + self.group_length * tiles + groups * (self.group + self.group_tile * tiles)


def group_of_prompt(layer: LayerGeometry) -> int:
    """Tokens of a prompt that the Gluon kernel on pages may compute together; 1 if each is by itself."""
    return PAGES_TUNING.group_of(layer, MOST_ROWS)


PREFILL_COST_MODEL = PrefillCostModel(
    measured="H200, torch 2.11, Triton 3.6, 2026-11-25: 90 chunks of 32 to 8,192 tokens after 0 to 65,536, 64 and 128 "
    "heads, all kinds of layers; the choice is at most 1.9 % slower than the better one. 2026-11-29: 74 chunks of 64 "
    "to 8,192 tokens, 8 to 32 heads, c128a and window-only; at most 7 % slower with 8 and 16 heads, 14 % with 32"
)

TUNING: Mapping[str, Tuning] = {DEFAULT: HOPPER, "cpu": INTERPRETER, "sm_90": HOPPER}
"""Tuning of the shared kernel."""
