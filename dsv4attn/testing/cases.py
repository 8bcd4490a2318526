"""The table of conformance cases. `CASES` has all of them, in the order in which they run.

Clauses are those of docs/contract.md; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing import check_insert, check_memory, check_slots
from dsv4attn.testing.case import Area, Case, CaseInput, Check
from dsv4attn.testing.cases_attention import BOTH, MIXED, SINKS, attention_cases
from dsv4attn.testing.cases_compressor import compressor_cases
from dsv4attn.testing.cases_layer import hyper_cases, indexer_cases, selection_cases, step_memory_cases
from dsv4attn.testing.cases_nan import nan_cases
from dsv4attn.testing.cases_projection import projection_cases
from dsv4attn.testing.cases_v41 import v41_cases
from dsv4attn.testing.check_gather import gathers, gathers_long
from dsv4attn.testing.check_prepare_rows import fills
from dsv4attn.testing.factories import KINDS, call, flash, layout, rows, step
from dsv4attn.testing.fp8_codes import Fp8Codes, gathers_every_code
from dsv4attn.testing.gather_limits import gathers_within
from dsv4attn.testing.oracle_cache import PagePlacement
from dsv4attn.testing.strided import each_strided

__all__ = ["CASES", "GROUPS"]

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
    "K": "compressor",
    "X": "index scores",
    "T": "selection",
    "H": "hyper-connections",
    "V": "steps of DeepSeek-V4.1",
}
"""Meaning of the letters of the clauses."""


def cache_cases() -> Iterator[Case]:
    """Writing, reading and moving records, and the steps in front of attention."""
    for cache, page in (
        ("ocp", 64),
        ("fnuz", 64),
        ("interleaved", 64),
        ("bf16", 64),
        ("ocp", 1),
        ("ocp", 2),
        ("v41", 32),
        ("v41-split", 64),
    ):
        name, inputs = f"{cache}-{page}", rows(cache, page=page, blocks=3 if page > 2 else 60)
        says = f"keys are written to {cache} pages of {page} as the oracle writes them, byte for byte"
        yield _cache(f"quantise-{name}", "C1 I4", says, inputs, check_insert.quantises)
        if cache.startswith("v41"):
            continue  # codes of rotated values may differ by one where the rotation is rounded otherwise
        says = f"keys are rotated and written to {cache} pages of {page}; kv itself stays"
        yield _cache(f"insert-{name}", "C1 I2", says, inputs, check_insert.inserts_rotated)
    for cache, page in (("v41-fp4", 64), ("v41-fp4-split", 32)):
        inputs = rows(
            cache, page=page, kind=LayerKind.C4A, geometry=flash("c4a"), placement=PagePlacement(page, 4608), blocks=4
        )
        says = f"keys are written to {cache} pages of {page} as the oracle writes them, byte for byte"
        yield _cache(f"quantise-{cache}-{page}", "C1 I4", says, inputs, check_insert.quantises)
        says = f"records of {cache} pages of {page} are gathered bit for bit, into their own rows only"
        yield _cache(f"gather-{cache}-{page}", "R1 R2 R3 C4", says, inputs, gathers)
    says = "pages further apart than the layout asks for are written where they begin, and gaps stay"
    gap = rows(placement=PagePlacement(64, 4608))
    yield _cache("quantise-gaps", "C1 C4 C6", says, gap, check_insert.quantises)
    says = "slots that are negative or do not exist are skipped, and no other byte is written"
    yield _cache("insert-skips", "I3 C6", says, gap, check_slots.writes_only_its_slots)
    says = "rows without a slot, or behind the slot mapping, have their q processed, and only other rows are inserted"
    yield _cache("insert-padding", "I3 I1 I2 C6", says, gap, check_slots.inserts_only_its_slots)
    says = "no position of padding is looked up, and none changes another row or a byte of the cache"
    yield _cache("no-token-insert", "B5", says, gap, check_slots.inserts_without_positions_of_padding)
    for name, dtype, cache in (("bf16", torch.bfloat16, "ocp"), ("fp32", torch.float32, "fp32")):
        inputs = rows(cache, dtype=dtype)
        says = f"{name} queries are normalised and rotated with the table's own angles, in place"
        yield _cache(f"qnorm-{name}", "I1 I5", says, inputs, check_insert.normalises_queries)
    inputs = rows("fp32", dtype=torch.float32)
    yield _cache(
        "insert-fp32", "I2 I5", "fp32 keys are rotated and written as they are", inputs, check_insert.inserts_rotated
    )
    says = "fp32 keys are rounded to bf16 before they are quantised"
    yield _cache("quantise-fp32-keys", "C1", says, rows("ocp", dtype=torch.float32), check_insert.quantises)
    for cache, page in (
        ("ocp", 64),
        ("fnuz", 64),
        ("interleaved", 16),
        ("bf16", 64),
        ("fp32", 32),
        ("ocp", 2),
        ("v41", 32),
        ("v41-split", 16),
    ):
        says = f"records of {cache} pages of {page} are gathered bit for bit, into their own rows only"
        inputs = rows(cache, page=page, blocks=4, placement=PagePlacement(page, 4608))
        yield _cache(f"gather-{cache}-{page}", "R1 R2 R3 C4", says, inputs, gathers)
    for cache, page in (("ocp", 16), ("fp32", 2), ("v41-fp4", 4)):
        says = f"rows and lists of a chunk are those of {cache} pages of {page}, of whole requests and of parts"
        inputs = rows(
            cache, page=page, kind=LayerKind.C4A, geometry=flash("c4a"), placement=PagePlacement(page, 4608), blocks=5
        )
        yield _cache(f"fill-{cache}-{page}", "R5", says, inputs, fills)
    says = "records behind the table, before the first position or past the output are absent, whatever lengths say"
    yield _cache("beyond-gather", "R3 R4", says, rows(page=4, blocks=4), gathers_within)
    for cache in ("ocp", "fnuz", "interleaved", "v41"):
        says = f"all 256 codes of {cache} under 236 scale bytes are gathered exactly"
        codes = Fp8Codes.of(phase=Phase.PREFILL, geometry=flash("swa"), layout=layout(cache))
        yield _cache(f"codes-{cache}-gather", "R1 C2", says, codes, gathers_every_code)


def odd_cases() -> Iterator[Case]:
    """Cache cases at sizes past every limit, with rows apart, with no row, and with an eps that changes the result."""
    says = "records of 1,031 keys are written as the oracle writes them"
    many = rows(count=1031, blocks=17)
    yield _cache("quantise-1031", "C1 F7", says, many, check_insert.quantises)
    says = "1,031 queries are normalised and rotated, and 1,031 keys rotated and written, in one step"
    yield _cache("insert-1031", "I1 I2 F7", says, many, check_insert.inserts_both)
    says = "records of 70 requests are gathered in one step, each by its own row of the block table"
    yield _cache(
        "gather-requests",
        "R1 R2 R3 C4 F7",
        says,
        rows(blocks=4, requests=70, placement=PagePlacement(64, 4608)),
        gathers,
    )
    says = "more than 1,024 records of a request are gathered, and the last ones of sequences of 1,048,576"
    yield _cache("gather-long", "R1 R2 R3 C4 F7", says, rows(blocks=5, placement=PagePlacement(64, 4608)), gathers_long)
    few = rows(count=9)
    says = "rows of k lie apart, and the records are the same"
    yield _cache("apart-quantise", "A7 C1", says, few, each_strided("k", check_insert.quantises))
    says = "rows of q, of kv or of the table of angles lie apart: the step is the same, and memory beside them stays"
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
        says = f"an eps of {eps:g}, beside queries so small that it shows, is the one that is added"
        name = f"qnorm-eps-{'default' if eps == 1e-6 else 'other'}"
        yield _cache(name, "I1 I5", says, rows(count=9, geometry=layer, size=size), check_insert.normalises_queries)
    for name, dtype, cache in (("bf16", torch.bfloat16, "ocp"), ("fp32", torch.float32, "fp32")):
        inputs = rows(cache, dtype=dtype, geometry=attrs.evolve(flash("swa"), q_norm=False, eps=1e-20))
        says = f"without eps, {name} queries are rotated and not normalised, and keys are written as ever"
        yield _cache(f"insert-rope-only-{name}", "I6 I2", says, inputs, check_insert.inserts_both)


def memory_cases() -> Iterator[Case]:
    """Workspace and addresses. They run last, because a backend that fails one may leave the device unusable."""
    batches = (tuple((before, 1) for before in range(0, 600, 40)), ((0, 60),), ((590, 1), (0, 3), (300, 5)))
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
        says = f"{phase.value} reads pages behind 2^31 and 2^32 bytes"
        inputs = call(phase, "plain", "swa", placements=(far, far), sinks=SINKS)
        yield _memory(f"far-{phase.value}", "A5", says, inputs, check_memory.far)
        says = f"{phase.value} reads pages of the compressed cache behind 2^31 and 2^32 bytes"
        inputs = call(
            phase, "plain", "c4a", placements=(PagePlacement(64), attrs.evolve(far, block_size=32)), sinks=SINKS
        )
        yield _memory(f"far-compressed-{phase.value}", "A5", says, inputs, check_memory.far)
    says = "records are written to pages behind 2^31 and 2^32 bytes"
    yield _memory("far-insert", "A5 C4", says, rows(placement=far, count=90), check_slots.far_inserts)
    says = "rotated keys are written to pages behind 2^31 and 2^32 bytes"
    yield _memory("far-insert-fused", "A5 C4", says, rows(placement=far, count=90), check_slots.far_rotated)
    says = "records are gathered from pages behind 2^31 and 2^32 bytes"
    yield _memory("far-gather", "A5 R1", says, rows(placement=far, blocks=3), gathers)


def _cache(name: str, clauses: str, says: str, inputs: CaseInput, check: Check) -> Case:
    return Case(name=name, area=Area.CACHE, clauses=clauses, says=says, inputs=inputs, check=check)


def _memory(name: str, clauses: str, says: str, inputs: CaseInput, check: Check) -> Case:
    return Case(name=name, area=Area.MEMORY, clauses=clauses, says=says, inputs=inputs, check=check)


LAYER = (compressor_cases, indexer_cases, selection_cases, hyper_cases, step_memory_cases, v41_cases)
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
