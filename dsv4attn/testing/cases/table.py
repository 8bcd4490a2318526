"""The table of conformance cases. `CASES` has all of them, in the order in which they run.

Clauses are those of docs/contract.md; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import attrs
import torch

from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.case import Area, Case, Check
from dsv4attn.testing.cases.attention import BOTH, MIXED, SINKS, attention_cases
from dsv4attn.testing.cases.layer import (
    compressor_cases,
    hyper_cases,
    indexer_cases,
    norm_cases,
    selection_cases,
    step_memory_cases,
    v41_cases,
)
from dsv4attn.testing.cases.whole_layer import whole_layer_cases
from dsv4attn.testing.checks import insert as check_insert
from dsv4attn.testing.checks import memory as check_memory
from dsv4attn.testing.checks.gather import fills, gathers, gathers_long, gathers_within
from dsv4attn.testing.checks.insert import FAR_POSITIONS, CacheRows, rows
from dsv4attn.testing.checks.projection import outputs, projects, projects_without_positions_of_padding
from dsv4attn.testing.checks.record_bytes import (
    SMALLEST_SCALES,
    EveryCode,
    NanKeys,
    gathers_every_code,
    gathers_nan,
    inserts_nan,
    shows_nan,
)
from dsv4attn.testing.kit.factories import (
    GROUP_COUNTS,
    HEADS,
    KINDS,
    PAGE_SIZES,
    CaseInput,
    flash,
    layout,
    tiny_geometry,
)
from dsv4attn.testing.kit.oracle_cache import PagePlacement
from dsv4attn.testing.kit.random_step import step
from dsv4attn.testing.kit.single_call import call
from dsv4attn.testing.kit.strided import each_strided

TYPES = (("bf16", torch.bfloat16, "ocp"), ("fp32", torch.float32, "fp32"))
"""Types of q and keys, each with a short name and a layout of the cache."""
_cache = partial(Case, Area.CACHE)
_memory = partial(Case, Area.MEMORY)


GROUPS = {
    "F": "forms and phases",
    "A": "indices, addresses",
    "M": "the formula",
    "B": "empty rows",
    "S": "sinks",
    "L": "lse",
    "C": "cache bytes",
    "I": "insert",
    "R": "gather",
    "P": "projection",
    "W": "workspace",
    "D": "same bits again",
    "N": "norms",
    "K": "compressor",
    "X": "index scores",
    "T": "selection",
    "H": "hyper-connections",
    "V": "ops of DeepSeek-V4.1",
}
"""Meaning of the letters of the clauses."""


def cache_cases() -> Iterator[Case]:
    """Writing, reading and moving records, and the ops before attention."""
    for cache, page in (
        *(("ocp", page) for page in PAGE_SIZES),
        ("fnuz", 64),
        ("interleaved", 64),
        ("bf16", 64),
        ("ocp", 1),
        ("ocp", 2),
        ("v41", 32),
        ("v41-split", 64),
    ):
        inputs = rows(cache, page=page, blocks=3 if page > 2 else 60)
        yield _quantise(cache, page, inputs)
        # codes of rotated values may differ by one where the rotation is rounded otherwise
        if not cache.startswith("v41"):
            yield _insert(cache, page, inputs)
    for cache, page in (("v41-fp4", 64), ("v41-fp4-split", 32)):
        inputs = _entry_rows(cache, page, blocks=4)
        yield _quantise(cache, page, inputs)
        yield _gather(cache, page, inputs)
    inputs = rows("nvfp4", page=7, blocks=4, count=25, placement=PagePlacement(7, 4608))
    yield _quantise("nvfp4", 7, inputs)
    yield _insert("nvfp4", 7, inputs)
    yield _gather("nvfp4", 7, inputs)
    says = "pages further apart than the layout asks for are written where they begin, and gaps stay"
    gap = rows(placement=PagePlacement(64, 4608))
    yield _cache("quantise-gaps", "C1 C4 C6", says, gap, check_insert.quantises)
    says = "slots that are negative or do not exist are skipped, and no other byte is written"
    yield _cache("insert-skips", "I3 C6", says, gap, check_insert.writes_only_its_slots)
    says = "rows without a slot, or past the slot mapping, have their q processed, and only other rows are inserted"
    yield _cache("insert-padding", "I3 I1 I2 C6", says, gap, check_insert.inserts_only_its_slots)
    says = "no position of padding is looked up, and none changes another row or a byte of the cache"
    yield _cache("no-token-insert", "B5", says, gap, check_insert.inserts_without_positions_of_padding)
    for name, dtype, cache in TYPES:
        inputs = rows(cache, dtype=dtype)
        says = f"{name} queries are normalised and rotated with the table's own angles, in place"
        yield _cache(f"qnorm-{name}", "I1 I5", says, inputs, check_insert.normalises_queries)
    inputs = rows("fp32", dtype=torch.float32)
    says = "fp32 keys are rotated and written as they are"
    yield _cache("insert-fp32", "I2 I5", says, inputs, check_insert.inserts_rotated)
    says = "fp32 keys are rounded to bf16 before they are quantised"
    yield _cache("quantise-fp32-keys", "C1", says, rows("ocp", dtype=torch.float32), check_insert.quantises)
    for cache, page in (
        *(("ocp", page) for page in PAGE_SIZES),
        ("fnuz", 64),
        ("interleaved", 16),
        ("bf16", 64),
        ("fp32", 32),
        ("ocp", 2),
        ("v41", 32),
        ("v41-split", 16),
    ):
        inputs = rows(cache, page=page, blocks=4 if page <= 64 else 3, placement=PagePlacement(page, 4608))
        yield _gather(cache, page, inputs)
    for cache, page in (("ocp", 16), ("fp32", 2), ("v41-fp4", 4), ("bf16", max(PAGE_SIZES))):
        says = f"rows and lists of a chunk are those of {cache} pages of {page}, of whole requests and of parts"
        inputs = _entry_rows(cache, page, blocks=5 if page < 64 else 3)
        yield _cache(f"fill-{cache}-{page}", "R5", says, inputs, fills)
    says = "records past the table, before the first position or past the output are absent, whatever lengths say"
    yield _cache("beyond-gather", "R3 R4", says, rows(page=4, blocks=4), gathers_within)
    yield from _code_cases()


def _entry_rows(cache: str, page: int, blocks: int) -> CacheRows:
    """Rows of compressed entries, on pages that lie further apart than they must."""
    placement = PagePlacement(page, 4608)
    return rows(cache, kind=LayerKind.CSA, geometry=flash("c4a"), placement=placement, blocks=blocks)


def _quantise(cache: str, page: int, inputs: CacheRows) -> Case:
    says = f"keys are written to {cache} pages of {page} as the oracle writes them, byte for byte"
    return _cache(f"quantise-{cache}-{page}", "C1 I4", says, inputs, check_insert.quantises)


def _insert(cache: str, page: int, inputs: CacheRows) -> Case:
    says = f"keys are rotated and written to {cache} pages of {page}; kv itself stays"
    return _cache(f"insert-{cache}-{page}", "C1 I2", says, inputs, check_insert.inserts_rotated)


def _gather(cache: str, page: int, inputs: CacheRows) -> Case:
    says = f"records of {cache} pages of {page} are gathered bit for bit, into their own rows only"
    return _cache(f"gather-{cache}-{page}", "R1 R2 R3 C4", says, inputs, gathers)


def odd_cases() -> Iterator[Case]:
    """Cache cases at sizes past every limit, with rows apart, with no row, and with an eps that changes the result."""
    says = "records of 1,031 keys are written as the oracle writes them"
    many = rows(count=1031, blocks=17)
    yield _cache("quantise-1031", "C1 F7", says, many, check_insert.quantises)
    says = "1,031 queries are normalised and rotated, and 1,031 keys rotated and written, in one step"
    yield _cache("insert-1031", "I1 I2 F7", says, many, check_insert.inserts_both)
    says = "records of 70 requests are gathered in one step, each by its own row of the block table"
    apart = PagePlacement(64, 4608)
    yield _cache("gather-requests", "R1 R2 R3 C4 F7", says, rows(blocks=4, requests=70, placement=apart), gathers)
    says = "more than 1,024 records of a request are gathered, and the last ones of sequences of 1,048,576"
    yield _cache("gather-long", "R1 R2 R3 C4 F7", says, rows(blocks=5, placement=apart), gathers_long)
    few = rows(count=9)
    says = "rows of k lie apart, and the records are the same"
    yield _cache("apart-quantise", "A7 C1", says, few, each_strided("k", check_insert.quantises))
    says = "rows of q, of kv or of the table of angles lie apart: the step is the same, and memory next to them stays"
    check = each_strided("q kv cos_sin_cache all", check_insert.inserts_both)
    yield _cache("apart-insert", "A7 I1 I2", says, few, check)
    says = "an insert of no keys, or of keys without slots, leaves the cache as it is"
    yield _cache("quantise-none", "C1 I3 I4", says, few, check_insert.quantises_nothing)
    says = "a step without rows leaves the cache as it is, and so do queries without slots, which are processed"
    yield _cache("insert-none", "C1 I1 I2 I3", says, few, check_insert.inserts_nothing)
    few = rows(count=9, table_rows=check_insert.FAR_POSITIONS)
    says = "queries and keys are rotated at positions beyond 65,536"
    yield _cache("insert-positions", "I1 I2 I5", says, few, check_insert.inserts_both)
    for eps, size in ((1e-6, 2.0**-10), (0.02, 0.5)):
        layer = attrs.evolve(flash("swa"), eps=eps)
        says = f"an eps of {eps:g}, with queries so small that it shows, is the one that is added"
        name = f"qnorm-eps-{'default' if eps == 1e-6 else 'other'}"
        yield _cache(name, "I1 I5", says, rows(count=9, geometry=layer, size=size), check_insert.normalises_queries)
    for name, dtype, cache in TYPES:
        inputs = rows(cache, dtype=dtype, geometry=attrs.evolve(flash("swa"), q_norm=False, eps=1e-20))
        says = f"without eps, {name} queries are rotated and not normalised, and keys are written as ever"
        yield _cache(f"insert-rope-only-{name}", "I6 I2", says, inputs, check_insert.inserts_both)


def memory_cases() -> Iterator[Case]:
    """Workspace and addresses. They run last, because a backend that fails one may leave the device unusable."""
    batches = (tuple((prefix, 1) for prefix in range(0, 600, 40)), ((0, 60),), ((590, 1), (0, 3), (300, 5)))
    for kind in KINDS:
        says = f"{kind}: batches within the limits run in a workspace planned once, which never grows"
        yield _memory(f"plan-{kind}", "W1", says, step(kind, *MIXED), check_memory.fits_the_plan(*batches))
        says = f"{kind}: whatever the workspace held before, and a second time, the bits are the same"
        yield _memory(f"stale-{kind}", "W2 W3 D1", says, step(kind, *MIXED, topk="holes"), check_memory.stale)
        says = f"{kind}: a smaller workspace means more chunks, and the same answer"
        yield _memory(f"capped-{kind}", "W4 F4", says, step(kind, *BOTH[Area.PREFILL], (60, 9)), check_memory.capped)
        says = f"{kind}: temporaries stay within transient_bytes"
        yield _memory(f"temporaries-{kind}", "W5", says, step(kind, *MIXED), check_memory.temporaries)
        says = f"{kind}: scratch of every smaller call is within scratch_bound"
        yield _memory(f"scratch-{kind}", "W1", says, step(kind, *MIXED), check_memory.scratch_is_bounded)
    far = PagePlacement(64, check_memory.FAR, 2**31)
    for phase in Phase:
        says = f"{phase.value} reads pages past 2^31 and 2^32 bytes"
        inputs = call(phase, "plain", "swa", placements=(far, far), sinks=SINKS)
        yield _memory(f"far-{phase.value}", "A5", says, inputs, check_memory.far)
        says = f"{phase.value} reads pages of the compressed cache past 2^31 and 2^32 bytes"
        placements = PagePlacement(64), attrs.evolve(far, block_size=32)
        inputs = call(phase, "plain", "c4a", placements=placements, sinks=SINKS)
        yield _memory(f"far-compressed-{phase.value}", "A5", says, inputs, check_memory.far)
    says = "records are written to pages past 2^31 and 2^32 bytes"
    yield _memory("far-insert", "A5 C4", says, rows(placement=far, count=90), check_insert.quantises)
    says = "rotated keys are written to pages past 2^31 and 2^32 bytes"
    yield _memory("far-insert-fused", "A5 C4", says, rows(placement=far, count=90), check_insert.inserts_rotated)
    says = "records are gathered from pages past 2^31 and 2^32 bytes"
    yield _memory("far-gather", "A5 R1", says, rows(placement=far, blocks=3), gathers)


FP8 = {"fp32": (2, 80), "e8m0": (1, 129), "bytes": (8, 24)}
"""Groups and ranks by format of the scales: the last block of rows has 32, 1 and 64 of 128."""


def projection_cases() -> Iterator[Case]:
    """All cases of the output projection."""
    for name, dtype, cache in TYPES:
        says = f"{name} outputs are turned back at the query's position and projected group by group"
        for groups in GROUP_COUNTS:
            inputs = rows(cache, heads=max(HEADS, groups), dtype=dtype, groups=groups, count=9)
            yield _projection(f"project-{groups}-{name}", "P1 P2", says, inputs)
    says = "1,031 outputs are turned back and projected in one step"
    yield _projection("project-1031", "P1 P2 F7", says, rows(count=1031, groups=8))
    says = "rows of o, of the table of angles, or of the weights lie apart, and the projection is the same"
    check = each_strided("o cos_sin_cache wo_a all", projects)
    yield _projection("apart-project", "A7 P1", says, rows(count=9), check)
    says = "outputs are turned back at positions beyond 65,536"
    yield _projection("project-positions", "P1 P2", says, rows(count=9, table_rows=FAR_POSITIONS))
    says = "no position of padding is looked up, and its rows stay zero"
    inputs = rows(count=17, groups=2)
    yield _projection("no-token-project", "B5", says, inputs, projects_without_positions_of_padding)
    says = "bf16 outputs are projected by fp32 matrices"
    yield _projection("project-mixed", "P1 P2", says, rows(count=9, weight_dtype=torch.float32))
    yield from _fp8_projection_cases()
    yield from _output_cases()


def _fp8_projection_cases() -> Iterator[Case]:
    """Block-scaled fp8 matrices, which core converts."""
    for scale, (groups, rank) in FP8.items():
        for dialect in ("ocp", "fnuz"):
            says = (
                f"matrices in {dialect} fp8 with {scale} scales of blocks, the last one short, are what they stand for"
            )
            inputs = rows(count=5, groups=groups, rank=rank, scale=scale, fnuz=dialect == "fnuz")
            yield _projection(f"project-fp8-{dialect}-{scale}", "P1 P2 P3", says, inputs)
    says = "matrices in fp8 with exponents of blocks of 32 x 32, the last ones short, are what they stand for"
    inputs = rows(count=5, groups=2, rank=72, scale="bytes", block=32)
    yield _projection("project-fp8-blocks-32", "P1 P2 P3", says, inputs)
    says = "fp32 outputs are projected by fp8 matrices"
    inputs = rows("fp32", dtype=torch.float32, count=5, rank=80, scale="fp32")
    yield _projection("project-fp8-mixed", "P1 P2 P3", says, inputs)
    says = "rows of an fp8 matrix lie apart, and the projection is the same"
    yield _projection("apart-project-fp8", "A7 P3", says, rows(count=5, rank=80, scale="bytes", strided="wo_a"))
    says = "fp8 matrices whose last blocks are short in both directions are what they stand for"
    odd = tiny_geometry(num_heads=6, head_dim=40, rope_dim=6)
    inputs = rows(geometry=odd, layout=layout("ocp", odd), count=5, groups=1, rank=130, scale="fp32")
    yield _projection("dims-project-fp8", "F5 P3", says, inputs)


def _output_cases() -> Iterator[Case]:
    """The whole projection, through wo_b."""
    for name, dtype, cache in TYPES:
        says = f"{name} outputs are turned back, projected group by group, and then by wo_b"
        yield _projection(f"output-{name}", "P4", says, rows(cache, dtype=dtype, count=9, rank=40, hidden=96), outputs)
    says = "bf16 outputs are projected by fp32 matrices, and by an fp32 wo_b"
    yield _projection("output-mixed", "P4", says, rows(count=9, weight_dtype=torch.float32, hidden=96), outputs)
    says = "outputs are projected by fp8 matrices, and by an fp8 wo_b whose last blocks are short"
    yield _projection("output-fp8", "P4", says, rows(count=5, rank=80, hidden=140, scale="e8m0"), outputs)
    says = "devices that each have some of the groups add up to the whole projection"
    yield _projection("output-ranks", "P4", says, rows(count=9, groups=4, rank=40, hidden=96, ranks=2), outputs)


def _code_cases() -> Iterator[Case]:
    """Gathering of all codes."""
    for cache in ("ocp", "fnuz", "interleaved", "v41", "nvfp4"):
        says = f"all 256 codes of {cache} under 236 scale bytes are gathered exactly"
        if cache == "nvfp4":
            says = f"all 16 codes of {cache} under every scale byte are gathered exactly"
        codes = EveryCode.of(Phase.PREFILL, cache)
        yield _cache(f"codes-{cache}-gather", "R1 C2", says, codes, gathers_every_code)
    for cache in ("ocp", "v41"):
        says = f"all 256 codes of {cache} under scale bytes 0 to 9, which no writer of ours emits, are gathered exactly"
        codes = EveryCode.of(Phase.PREFILL, cache, SMALLEST_SCALES)
        yield _cache(f"codes-{cache}-smallest-gather", "R1 C2", says, codes, gathers_every_code)


def nan_cases() -> Iterator[Case]:
    """All cases of NaN keys."""
    for phase in Phase:
        for cache in ("ocp", "fnuz", "interleaved", "v41", "bf16", "nvfp4"):
            says = f"{phase.value} of {cache} keys: a NaN in a selected key makes its rows NaN, and harms no other row"
            # one kind with two segments is enough, since all kinds are read in the same way
            inputs = NanKeys.of(phase, cache, "c4a" if cache == "ocp" else "swa")
            yield Case(Area(phase.value), f"nan-{cache}-{phase.value}", "C8 C6", says, inputs, shows_nan)
    for cache in ("ocp", "fnuz", "interleaved", "v41", "nvfp4"):
        says = f"NaN codes, scales and RoPE values of {cache} records are gathered as NaN"
        inputs = NanKeys.of(Phase.PREFILL, cache, "swa")
        yield _cache(f"nan-{cache}-gather", "C8 R1", says, inputs, gathers_nan)
    for cache in ("ocp", "fnuz", "bf16", "nvfp4"):
        for name, fused in (("quantise", False), ("insert", True)):
            says = f"keys that hold a NaN are written to {cache} records that read as NaN, and the others as they are"
            inputs = attrs.evolve(NanKeys.of(Phase.DECODE, cache, "swa"), rows=5)
            yield _cache(f"nan-{cache}-{name}", "C8", says, inputs, partial(inserts_nan, fused))


def _projection(name: str, clauses: str, says: str, inputs: CaseInput, check: Check = projects) -> Case:
    return _cache(name, clauses, says, inputs, check)


LAYER = (
    norm_cases,
    compressor_cases,
    indexer_cases,
    selection_cases,
    hyper_cases,
    step_memory_cases,
    v41_cases,
    whole_layer_cases,
)
"""Cases of the layer around attention."""
CASES: tuple[Case, ...] = (
    *attention_cases(),
    *cache_cases(),
    *nan_cases(),
    *odd_cases(),
    *projection_cases(),
    *memory_cases(),
    *(case for cases in LAYER for case in cases()),
)
assert len({case.name for case in CASES}) == len(CASES), "names of cases are unique"
