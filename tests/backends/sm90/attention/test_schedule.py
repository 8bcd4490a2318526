"""The schedule of the sm90 backend: every tile attended once, every row written once, whatever the lengths."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4attn.backends._triton.attention.launch import divider
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.backends.sm90.attention import kernels_common
from dsv4attn.backends.sm90.attention.kernels_schedule import (
    COST,
    FP8_PAGES,
    NVFP4_PAGES,
    PAIR_COST,
    SPLIT,
    place_in_part,
    power_of_part,
)
from dsv4attn.core.cache.layout import KVCacheLayout
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.sm90.attention.kernels_schedule_walk import pages, powers, walk
from tests.backends.sm90.attention.mutants import planted

EXTRA, PAIR_EXTRA, SPLIT_COST = COST.value, PAIR_COST.value, SPLIT.value
LOOK = 4 if INTERPRETED else 128
"""Rows that a program looks at together: few, so that it looks several times."""


@frozen
class Line:
    """Lengths of rows in one or two segments, their widths, how many programs share them, and whether in pairs.

    whole_rows: whether no row may be split.
    """

    lens: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    programs: int
    least: int = 1
    paired: bool = False
    whole_rows: bool = False

    @property
    def columns(self) -> list[list[int]]:
        """Columns that count, of each row in each segment."""
        return [[min(max(n, 0), w) for n in row] for row, w in zip(self.lens, self.widths, strict=True)]

    @property
    def tiles(self) -> list[list[tuple[int, int, int]]]:
        """Segment, first column and columns of each tile of each row, in order. The last of a pair may have none."""
        step = 128 if self.paired else 64
        return [
            [(s, c, max(min(64, n - c), 0)) for s, n in enumerate(row) for c in range(0, -(-n // step) * step, 64)]
            for row in zip(*self.columns, strict=True)
        ]

    @property
    def length(self) -> int:
        """Tiles of the line: a row without keys has a place too."""
        return sum(max(len(tiles), 1 + self.paired) for tiles in self.tiles)


@frozen
class Walk:
    """What all programs say."""

    chunks: Any
    tiles: Any
    indices: Any
    paired: Any
    rows: Any
    table: Any


def walked(line: Line, kernel: Any = walk) -> Walk:
    """Ask every program."""
    tokens = len(line.lens[0])
    most = line.length + tokens + 2
    rows_of_segments = [torch.full((tokens, w + 3), -1, dtype=torch.int32) for w in line.widths]
    for s, rows in enumerate(rows_of_segments):
        # every index tells segment, row and column
        rows[:] = (torch.arange(tokens)[:, None] * 10000 + torch.arange(rows.shape[1])[None] + 1_000_000_000 * s).int()
    lens = [torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in line.lens]
    given_ = [(rows.to(DEVICE), n) for rows, n in zip(rows_of_segments, lens, strict=True)] * (3 - len(lens))
    numbers = [n for rows, w in zip(rows_of_segments, line.widths, strict=True) for n in (w, rows.stride(0))] * (
        3 - len(lens)
    )
    outs = [
        torch.full(shape, -7, dtype=torch.int32, device=DEVICE)
        for shape in [
            (line.programs, 3),
            (line.programs, most, 3),
            (line.programs, most, 64),
            (line.programs, 2 * most, 64),
            (line.programs, most, 4),
            (max(tokens, 1), 2),
        ]
    ]
    once = tokens <= LOOK
    args = [*outs, *given_[0], *given_[1], *numbers, tokens, line.least, most]
    constants = {"SEGMENTS": len(lens), "BT": LOOK, "PAIRED": line.paired, "ONCE": once, "WHOLE_ROWS": line.whole_rows}
    launch(kernel, (line.programs,), args, constants)
    return Walk(*(out.cpu().numpy() for out in outs))


def check(line: Line, kernel: Any = walk) -> None:
    """Everything that the kernels rely on."""
    schedule, tiles_expected, tokens = walked(line, kernel), line.tiles, len(line.lens[0])
    met: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    places = []
    for program in range(line.programs):
        count, tiles, rows = schedule.chunks[program]
        assert count == tiles, "the producer makes as many tiles as it meets"
        walk_, rows_ = schedule.tiles[program, :tiles], schedule.rows[program, :rows]
        # both walks are one
        assert [(t, k) for t, a, b, _ in rows_ for k in range(a, b)] == [(t, k) for t, k, _ in walk_]
        for (t, k, inside), slots in zip(walk_, schedule.indices[program, :tiles], strict=True):
            assert inside == (tiles_expected[t][k][0] == 0) or not tiles_expected[t][k][2]
            assert (slots == slots_of(tiles_expected, t, k)).all()
        if line.paired:
            # a row without keys has a pair without columns
            pairs = [(t, k, b) for t, a, b, _ in rows_ for k in range(a, max(b, a + 2))]
            for (t, k, b), slots in zip(pairs, schedule.paired[program], strict=False):
                assert (slots == (slots_of(tiles_expected, t, k) if k < b else -1)).all()
            assert (schedule.paired[program, len(pairs) :] == -7).all()
        for t, first, last, part in rows_:
            met[t].append((program, first, last, part))
            places += [part] if part >= 0 else []
    assert sorted(met) == list(range(tokens)), "every row has a program"
    assert len(places) == len({*places}), "no two parts have one place"
    for t, pieces in met.items():
        assert [first for _, first, _, _ in pieces] == [0, *(last for _, _, last, _ in pieces[:-1])]
        assert pieces[-1][2] == len(tiles_expected[t])
        first, count = pieces[0][0], len(pieces)
        # where `combine_parts` looks for them
        sides = [2 * (first + i) + (i == 0) for i in range(count)]
        assert [part for *_, part in pieces] == ([-1] if count == 1 else sides)
        assert [program for program, *_ in pieces] == list(range(first, first + count))
    if line.whole_rows:
        assert all(len(pieces) == 1 for pieces in met.values()), "no row is split"
    elif tokens <= line.programs:
        assert [tuple(said) for said in schedule.table] == [(met[t][0][0], len(met[t])) for t in range(tokens)]
    else:
        # a program's last row that begins in its chunk: no earlier one is split
        begun = {pieces[0][0]: t for t, pieces in sorted(met.items())}
        assert {p: tuple(said) for p, said in enumerate(schedule.table[: line.programs]) if said[1]} == {
            p: (t, len(met[t])) for p, t in begun.items()
        }
        assert sum(len(pieces) > 1 for pieces in met.values()) == sum(len(met[t]) > 1 for t in begun.values())


def slots_of(tiles: Any, t: int, k: int) -> Any:
    """Indices of tile k of row t."""
    segment, column, n = tiles[t][k]
    return np.where(np.arange(64) < n, 1_000_000_000 * segment + t * 10000 + column + np.arange(64), -1)


def longest_share(line: Line) -> int:
    return int(walked(line).chunks[:, 0].max())


lengths = st.integers(-70, 450)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    tokens, programs = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    segments = draw(st.integers(1, 2))
    widths = tuple(draw(st.sampled_from([0, 1, 63, 64, 65, 128, 400])) for _ in range(segments))
    length = st.tuples(*[lengths] * tokens)
    same = lengths.map(lambda n: (n,) * tokens)
    lens, paired = tuple(draw(st.one_of(length, same)) for _ in widths), segments == 1 and draw(st.booleans())
    return Line(lens, widths, programs, draw(st.sampled_from([1, 1, 3])), paired, draw(st.booleans()))


@pytest.mark.matrix
@settings(max_examples=25 if INTERPRETED else 300)
@example(Line(((640,) * 4,), (640,), 7))
@example(Line(((128,) * 3, (0, 1, 64)), (128, 400), 1))
@example(Line(((0, 0, -5),), (64,), 5))
@example(Line(((400,), (400,)), (400, 400), 7))
@example(Line(((1, 300, 0, 450, 65, 129, 0),), (450,), 3, 3, paired=True))
@example(Line(((1, 300, 0, 450, 65, 129, 0),), (450,), 3, whole_rows=True))
@example(Line(((640,) * 9,), (640,), 4, whole_rows=True))
@example(Line(((64, 3000, 64),), (3000,), 7, whole_rows=True))
@given(lines())
def test_every_tile_is_attended_once_and_every_row_is_written_once(line: Line) -> None:
    check(line)


@pytest.mark.slow
@settings(max_examples=100 if INTERPRETED else 300)
@given(lines())
def test_so_is_every_tile_of_more_lines(line: Line) -> None:
    check(line)


def test_a_call_without_rows_has_nobody() -> None:
    schedule = walked(Line(((), ()), (64, 64), 3))

    assert not schedule.chunks.any()


@pytest.mark.parametrize(("tokens", "programs"), [(1, 4), (3, 4), (4, 4), (5, 4), (9, 4), (2, 7)])
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_rows_that_are_alike_are_shared_evenly(tokens: int, tiles: int, programs: int) -> None:
    """The longest chunk is hardly longer than the mean, but where a whole row is better than an even share."""
    line = Line(((64 * tiles,) * tokens,), (64 * tiles,), programs)
    even = ceil(tokens * tiles / programs)

    assert longest_share(line) <= even + even // 16 + EXTRA + SPLIT_COST * tokens // programs


@pytest.mark.parametrize("tokens", [4, 5, 7])
def test_rows_are_not_split_where_that_is_hardly_shorter(tokens: int) -> None:
    line = Line(((192, 64, 0, 65, 128, 192, 1)[:tokens],), (256,), 7)
    schedule = walked(line)

    assert (schedule.table[:, 1] == 1).all()
    assert [list(chunk) for chunk in schedule.chunks[:tokens]] == [[len(t), len(t), 1] for t in line.tiles]
    assert not schedule.chunks[tokens:].any()


def test_whole_rows_are_shared_as_evenly_as_they_can_be() -> None:
    """A program's chunk is longer than the mean by less than a row."""
    rng = np.random.default_rng(3)
    for tokens in (1, 6, 7, 8, 60):
        lens = tuple(int(n) for n in rng.integers(0, 700, tokens))
        line = Line((lens,), (700,), 7, whole_rows=True)
        mean = ceil((line.length + EXTRA * tokens) / 7)

        assert longest_share(line) <= mean + max(len(tiles) for tiles in line.tiles) - 1


def test_rows_that_differ_are_shared_evenly_with_what_a_row_costs() -> None:
    lens = (0, 640, 1, 64, 3000, 128, 0, 700, 65, 2000)
    line = Line((lens,), (3000,), 7)

    assert longest_share(line) <= ceil((line.length + EXTRA * len(lens)) / 7)


@pytest.mark.matrix
def test_pairs_are_whole_and_shared_evenly() -> None:
    """Rows of one tile take as long as rows of two: a window that fills up costs what a full one does."""
    lens = tuple(min(t + 1, 128) for t in range(160))
    schedule = walked(Line((lens,), (128,), 7, paired=True))

    assert (schedule.table[:7, 1] == 1).all(), "no row is split"
    assert max(schedule.chunks[:, 2]) == ceil(160 / 7)
    uneven = tuple(max(1, 640 - 9 * t) for t in range(36))
    line = Line((uneven,), (640,), 7, paired=True)
    assert longest_share(line) <= ceil((line.length + PAIR_EXTRA * 36) / 7) + 1
    assert all(first % 2 == 0 for rows in walked(line).rows for _, first, _, _ in rows if first > 0)


def test_a_chunk_is_never_shorter_than_the_least() -> None:
    assert sorted(walked(Line(((640,),), (640,), 6, least=4)).chunks[:, 0]) == [0, 0, 0, 0, 5, 5]


PLANTS = {
    "an empty row has no place": ("m = room_of(keys, n)\n", "m = n\n"),
    "a row's own chunk is as long as its tiles": (
        "tl.where(owned, cdiv(m, length) * length,",
        "tl.where(owned, tl.maximum(n, 1),",
    ),
    "a row follows in another's own chunk": ("length, tl.where(owned, _MOST_TILES, extra))", "length, extra)"),
    "the row behind an end is skipped": ("(end - tl.where(owned, 0, extra) <= lo)", "(end <= lo)"),
    "a length is not cut to the width": (
        "tl.minimum(tl.maximum(tl.load(first.lens + t, mask=there, other=0), 0), first.width)",
        "tl.maximum(tl.load(first.lens + t, mask=there, other=0), 0)",
    ),
    "a negative length": (
        "tl.maximum(tl.load(first.lens + t, mask=there, other=0), 0)",
        "tl.load(first.lens + t, mask=there, other=0)",
    ),
    "rows of a second look begin at 0": ("before += tl.sum(m, 0)", "before += 0"),
    "a walk forgets what a row costs": (
        "pos += room_of(keys, tiles_of(keys, n0, n1)) + chunk.extra",
        "pos += room_of(keys, tiles_of(keys, n0, n1))",
    ),
    "the second segment begins at its second tile": ("column = (k - before) * TILE", "column = k * TILE"),
    "columns behind the length": ("tl.where(t < chunk.tokens, length, 0)", "length + 1"),
    "a last part is left out": ("until - own + 1", "until - own"),
    "a row's line in place of its program's": ("tl.where(by_program, own, t)", "t"),
    "a program where no row begins names one": ("chunk.length * 2 + 1, 0)", "chunk.length * 2 + 1, 2)"),
    "two parts of a program in one place": ("program * 2 + (pos >= chunk.lo).to(tl.int32)", "program * 2"),
    "columns behind the length, in pairs": ("mask=column < n, other", "mask=column < n + 1, other"),
    "an empty row has no pair": ("tl.maximum((last - first) // 2, 1)", "(last - first) // 2"),
    "the empty half of a pair has no place": ("n += n & 1", "n += 0"),
    "tiles of the chunk are miscounted": ("tl.minimum(hi, start + n)", "tl.minimum(hi - 1, start + n)"),
}
HARD = [
    Line(((640,) * 4,), (640,), 7),
    Line(((0, 500, -200, 64, 0, 129, 450), (64, 0, 0, 70, -1, 300, 1)), (400, 128), 4),
    Line(((0, 0, -300, 900),), (128,), 3),
    Line(((70, 200, 0, 130),), (200,), 3),
    Line(((320, 64, 0, 320),), (320,), 4),
    Line(((128,) * 9, (0, 64, 65, 0, 400, 1, 2, 3, 64)), (128, 400), 5),
    Line(((1, 300, 0, 450, 65, 129, 0),), (450,), 3, 3, paired=True),
    Line(((64, 0, 2000, 0, 64, 1),), (2000,), 4),
]


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="what is planted is a text")
@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Any) -> None:
    kernel = planted(tmp_path, *PLANTS[bug]).walk
    mistakes = 0
    for line in HARD:
        try:
            check(line, kernel)
        except (AssertionError, IndexError):
            mistakes += 1

    assert mistakes


@pytest.mark.parametrize(("record", "kind"), [("fp8_ds_mla", FP8_PAGES), ("v4_nvfp4", NVFP4_PAGES)])
@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 256])
def test_a_slot_s_record_is_where_the_format_has_it(size: int, record: str, kind: Any) -> None:
    layout = KVCacheLayout.of_record(record)
    codes, _, scales = layout.regions(size)
    stride = -(-size * layout.record_bytes // 16) * 16 + 48
    count = 5 * size
    slots = [-1, -7, -(2**31), 2**31 - 1, count, count - 1, 0, size - 1, size % count, 2 * size + size // 2, 1 % count]
    slots += [0] * (16 - len(slots))
    out = torch.zeros(3, 16, dtype=torch.int64, device=DEVICE)
    cache = torch.zeros(1, dtype=torch.uint8, device=DEVICE)
    slot_tensor = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    launch(
        pages,
        (1,),
        (out, slot_tensor, cache, size, *divider(size), stride // 16, count - 1),
        {"N": 16, "KIND": kind.value},
    )

    for slot, ok, data, scale in zip(slots, *out.tolist(), strict=True):
        assert ok == (0 <= slot < count)
        page, of = divmod(slot if ok else 0, size)
        assert data == page * stride + codes.offset + of * codes.stride
        assert scale == page * stride + scales.offset + of * scales.stride


@pytest.mark.parametrize(
    ("size", "slot"), [(2**20, 2**31 - 2), (2**20, 2**31 - 1), (50_000_000, 2_000_000_007), (4_000_000, 3_999_999)]
)
def test_addresses_have_64_bits(size: int, slot: int) -> None:
    stride = -(-size * 584 // 16) * 16
    out = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    cache = torch.zeros(1, dtype=torch.uint8, device=DEVICE)
    slot_tensor = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
    launch(
        pages,
        (1,),
        (out, slot_tensor, cache, size, *divider(size), stride // 16, 2**31 - 1),
        {"N": 1, "KIND": FP8_PAGES.value},
    )

    page, of = divmod(slot, size)
    assert out[:, 0].tolist() == [1, page * stride + of * 576, page * stride + size * 576 + of * 8]


def test_parts_are_scaled_to_what_fp16_has() -> None:
    largest = torch.tensor([0.0, 1e-45, 1e-38, 0.75, 1.0, 65504.0, 1.5 * 2.0**127, torch.inf], device=DEVICE)
    out = torch.empty(2, len(largest), device=DEVICE)
    launch(powers, (1,), (out, largest), {"N": len(largest)})
    exponent, inverse = out

    assert (exponent == exponent.to(torch.uint8)).all()
    assert (2.0 ** (exponent - 127) * inverse == 1).all()
    held = (largest * inverse)[:-1]
    assert (held < 2**15).all()
    assert (held[3:] >= 2**14).all()
    assert (held.half() / inverse[:-1])[3:].tolist() == largest[3:-1].tolist()


@pytest.mark.parametrize("first", [0, 96, 384])
def test_the_gluon_kernels_write_parts_where_they_are_read(first: int) -> None:
    """Numbers go the way that the text of `write_part` says, which no interpreter runs, to `place_in_part`."""
    text = inspect.getsource(kernels_common.write_part.fn)
    match = re.search(r"reshape\(result, \[([^]]*)\]\), \(([^)]*)\)\)", text)
    assert match is not None
    shape = [int(n) for n in match[1].replace("GROUPS", "2").split(",")]
    order = [int(n) for n in match[2].split(",")]
    head, column = np.meshgrid(np.arange(64), first + np.arange(32), indexing="ij")

    def of_threads(x: Any) -> Any:
        return x.reshape(shape).transpose(order).reshape(128, 2, 2, 2, 2)

    thread, group = np.arange(128), np.arange(2)
    match = re.search(r"to = place \+ \((.*)\)\n", text)
    assert match is not None
    to = eval(match[1], {"thread": thread})  # noqa: S307 - a sum, of our own source
    place = of_threads(place_in_part.fn(head, column))
    match = re.search(r"expand_dims\((group \* 256.*), 0\)\n", text)
    assert match is not None
    offsets = eval(match[1], {"group": group, "FIRST": first})  # noqa: S307
    expected = to[:, None, None] + offsets[:, None] + np.arange(8)
    assert np.array_equal(place.reshape(128, 2, 8), expected)

    match = re.search(r"expand_dims\((group \* 32.*), 0\)\n", text)
    assert match is not None
    offsets = eval(match[1], {"group": group, "FIRST": first})  # noqa: S307
    power = of_threads(power_of_part.fn(head, column))
    word = (to // 8)[:, None] + offsets
    # a word's bytes are the powers of both heads, for all their columns
    assert np.array_equal(power, np.broadcast_to(2 * word[:, :, None, None, None] + np.arange(2)[:, None], power.shape))
