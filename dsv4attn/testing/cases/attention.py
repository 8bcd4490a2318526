"""Cases of decode and prefill: whole steps through `forward_mqa`, then calls made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from dsv4attn.core.contract.backend import Phase
from dsv4attn.testing.case import Area, Case, Check
from dsv4attn.testing.checks import attention as checks
from dsv4attn.testing.checks.attention import equals_oracle
from dsv4attn.testing.checks.record_bytes import SMALLEST_SCALES, EveryCode, reads_every_code
from dsv4attn.testing.kit.factories import HEAD_COUNTS, INDEX_TOPKS, KINDS, PAGE_SIZES, CaseInput, layout, tiny_geometry
from dsv4attn.testing.kit.oracle_cache import PagePlacement
from dsv4attn.testing.kit.random_step import step
from dsv4attn.testing.kit.single_call import call
from dsv4attn.testing.kit.strided import each_strided

DECODES = ((0, 1), (1, 1), (62, 1), (63, 1), (64, 1), (126, 1), (127, 1), (128, 1), (254, 1), (255, 1), (2100, 1))
"""Requests around the edges of a page, of the window, and of an entry, and one long context."""
PREFILLS = ((0, 5), (60, 9), (122, 12), (252, 6), (1000, 2))
MIXED = ((300, 1), (9, 1), (0, 7), (130, 6))
BOTH = {Area.DECODE: ((300, 1), (70, 1), (9, 1)), Area.PREFILL: ((0, 7), (130, 6), (300, 3))}
"""A small batch of each phase."""
ONE_CHUNK = ((0, 7), (20, 6), (30, 3))
"""Prompts so short that one chunk of prefill has all of them."""
SINKS = (-math.inf, math.inf, 20.0, -20.0, 1e4, -1e4, 0.0, 1.5)
V41_PAIRS = {
    "v41-v41": ("v41", "v41"),
    "v41-fp4": ("v41", "v41-fp4"),
    "v41-fp4-split": ("v41-split", "v41-fp4-split"),
    "ocp-fp4": ("ocp", "v41-fp4"),
}
"""Records of window and compressed caches: pairs of V4.1, and V4's window with V4.1's smallest record."""
OTHER_HEADS = (1, 3, 4, 80)
"""Head counts that no preset gives: small ones, and one above 64 that is no multiple of 64."""
PHASE = {Area.DECODE: Phase.DECODE, Area.PREFILL: Phase.PREFILL}


def _case(
    area: Area, name: str, clauses: str, says: str, inputs: CaseInput, check: Check = equals_oracle, **flags: bool
) -> Case:
    return Case(area, name, clauses, says, inputs, check, **flags)


def attention_cases() -> Iterator[Case]:
    """All cases of decode and prefill."""
    yield from _steps()
    yield from _sizes()
    for area in (Area.DECODE, Area.PREFILL):
        yield from _shapes(area)
        yield from _contents(area)
        yield from _sinks(area)
        yield from _calls(area)
        yield from _apart(area)
    yield from _windows()
    yield from _ranks()


def _steps() -> Iterator[Case]:
    """Each kind of layer in each phase, and steps that must give equal results."""
    for kind in KINDS:
        says = f"{kind}: queries around every edge of pages, window and entries equal the oracle"
        yield _case(Area.DECODE, f"decode-{kind}", "F1 M1", f"decode, {says}", step(kind, *DECODES))
        yield _case(Area.PREFILL, f"prefill-{kind}", "F1 M1", f"prefill, {says}", step(kind, *PREFILLS))
        says = f"{kind}: decode and prefill requests of one batch equal the oracle"
        yield _case(Area.PREFILL, f"mixed-{kind}", "F2 M1", says, step(kind, *MIXED, (20, 4, 2), extra_rows=3))
    for kind in KINDS:
        says = f"{kind}: where q of prefill is given before norm and rotation, the answer and the caches are the same"
        fields: dict[str, Any] = {"raw_q": True, "poison": 0xFF, "extra_rows": 3, "sinks": SINKS, "topk": "holes"}
        inputs = step(kind, *MIXED, (20, 4, 2), select=65, **fields)
        yield _case(Area.PREFILL, f"raw-{kind}", "I7 F2 M1", says, inputs, checks.reads_raw_q)
    for kind in KINDS:
        says = f"{kind}: one to four tokens of a request, verified in one step, equal the oracle and single steps"
        verify = step(kind, (300, 4), (125, 4), (7, 4), num_speculative_tokens=3)
        check = checks.step_by_step((4,), (1, 1, 1, 1), (3, 1), (1, 2, 1))
        yield _case(Area.DECODE, f"verify-{kind}", "F3 F4", says, verify, check)
        says = f"{kind}: a prompt gives the same however it is cut, down to token by token, and leaves the same bytes"
        prompt, check = step(kind, (118, 14)), checks.step_by_step((14,), (7, 7), (1, 13), (9, 1, 4), (1,) * 14)
        yield _case(Area.PREFILL, f"chunks-{kind}", "F4 F2", says, prompt, check)
    for kind in KINDS:
        says = f"{kind}: layers of one step, on one metadata object and one workspace, each equal the oracle, twice"
        # short contexts: the history of three layers is inserted
        inputs = step(kind, (130 if kind == "c128a" else 40, 1), (9, 1), topk="holes", select=9)
        yield _case(
            Area.DECODE, f"layers-{kind}", "F8 A9" if kind == "c4a" else "F8", says, inputs, checks.layers_share
        )
    for kind in KINDS:
        says = f"{kind}: if deterministic, bits of a row depend neither on the cut of its request nor on other requests"
        inputs = step(kind, (140, 4), (0, 3), topk="holes", extra_rows=2)
        check = checks.any_cut_same_bits((1, 1, 1, 1), (1, 2, 1))
        yield _case(Area.DECODE, f"any-cut-{kind}", "D2", says, inputs, check)
    says = "on V4.1's records, if deterministic, bits of a row depend neither on the cut of its request nor on others"
    inputs = step("c4a", (140, 4), (0, 3), topk="holes", extra_rows=2, cache="v41", compressed="v41-fp4", ratio=1)
    yield _case(Area.DECODE, "any-cut-v41", "D2", says, inputs, checks.any_cut_same_bits((1, 2, 1)))
    says = "without sinks, if deterministic, bits of a row depend neither on the cut of its request nor on others"
    inputs = step("c4a", (140, 3), (0, 3), sinks=None)
    yield _case(
        Area.DECODE, "any-cut-plain-softmax", "D2", says, inputs, checks.any_cut_same_bits((1, 2), random_cuts=0)
    )
    # rows of more than 640 keys, next to short ones
    for kind, context in (("c4a", 2800), ("c128a", 90_000)):
        says = f"{kind}: if deterministic, long rows and short ones of a batch have the bits that they have alone"
        inputs = step(kind, (context, 2), (30, 2), select=1200, topk="holes")
        yield _case(
            Area.DECODE, f"any-cut-long-{kind}", "D2", says, inputs, checks.any_cut_same_bits((1, 1), random_cuts=0)
        )
    says = "layers of one step with decode and prefill requests each equal the oracle, twice"
    inputs = step("c4a", (40, 1), (9, 1), (0, 7), (30, 6), topk="holes", select=9)
    yield _case(Area.PREFILL, "layers-mixed", "F8 F2", says, inputs, checks.layers_share)
    ragged = step("c4a", (300, 1), (126, 3), (64, 2), (5, 4), (9, 0), (0, 1), num_speculative_tokens=3)
    says = "requests of one step may have different numbers of tokens, or none"
    yield _case(Area.DECODE, "verify-ragged", "F3", says, ragged)
    says = "a rank that holds half of the heads computes those heads, with their own sinks"
    yield _case(Area.PREFILL, "slices-of-heads", "S6", says, step("c4a", *MIXED), checks.slices_of_heads)


def _windows() -> Iterator[Case]:
    """Windows that are not the W positions up to a query."""
    for (area, phase), kind in product(PHASE.items(), ("swa", "c4a")):
        says = (
            f"{area.value}, {kind}: rows of 203 columns for the window, with holes, repeated slots, and rows of no key"
        )
        wide = call(phase, "mixed", kind, window_columns=203, sinks=SINKS)
        yield _case(area, f"call-wide-{kind}-{area.value}", "F9", says, wide)
    says = "each token of a draft block sees the window before the block, and the whole block"
    blocks = step(
        "swa", (300, 5), (3, 4), (126, 5), (64, 1), (0, 2), num_speculative_tokens=4, causal=False, poison=0xFF
    )
    yield _case(Area.DECODE, "block-swa", "F9 F10", says, blocks)
    for kind in ("c4a", "c128a"):
        says = f"{kind}: prefill tokens that see later ones of their request, and decode tokens, equal the oracle"
        inputs = step(kind, (300, 1), (0, 7), (250, 12), (70, 3), ahead=5, poison=0xFF, topk="holes", select=65)
        yield _case(Area.PREFILL, f"ahead-{kind}", "F9", says, inputs)
    for kind in ("swa", "c4a"):
        says = f"{kind}: no window has a key before its request's first position, be it decode or prefill"
        # extra rows make the limits so large that gathered keys of all requests are in one chunk
        fields: dict[str, Any] = {"replay": (290, 0, 0, 100, 250), "extra_rows": 400, "poison": 0xFF}
        inputs = step(kind, (300, 1), (9, 1), (0, 7), (130, 6), (250, 4), **fields)
        yield _case(Area.PREFILL, f"bounded-{kind}", "F10", says, inputs)


def _ranks() -> Iterator[Case]:
    """Compressed entries divided between ranks. Some ranks have no key for a row, and some none at all."""
    fields: dict[str, Any] = {"sinks": SINKS, "topk": "holes", "select": 65, "extra_rows": 2, "poison": 0xFF}
    # short contexts, since each rank's history is inserted; the first request's token completes an entry
    for area, requests, size, run in (
        (Area.DECODE, ((35, 1), (9, 1), (1, 1)), 2, 1),
        (Area.PREFILL, ((35, 2), (0, 7, 2)), 3, 2),
    ):
        says = (
            f"{area.value}: parts of {size} ranks are attention over their own entries; merged by lse, and then with "
            "the sink, they are the whole"
        )
        inputs = step("c4a", *requests, **fields)
        yield _case(area, f"ranks-{area.value}", "L7", says, inputs, checks.over_ranks((size, run)), needs_lse=True)


def _sizes() -> Iterator[Case]:
    """Sizes past every limit that a backend could have silently. Rows have few keys, so that the oracle is quick."""
    says = "positions up to 1,048,575 are served"
    yield _case(Area.DECODE, "million", "M1 F7", says, step("swa", (2**20 - 3, 1), (2**20 - 1, 1)))
    for kind in ("c4a", "c128a"):
        says = f"{kind}: a decode query past 1,048,575 tokens, and a short one with it, equal the oracle"
        yield _case(Area.DECODE, f"million-{kind}", "F7", says, step(kind, (2**20 - 1, 1), (70, 1), distinct=61))
    says = "c128a: prefill queries past 1,048,573 tokens, and a short prompt with them, equal the oracle"
    yield _case(Area.PREFILL, "million-prefill", "F7", says, step("c128a", (2**20 - 3, 3), (0, 2), distinct=61))
    says = "decode of 1,031 requests in one step equals the oracle"
    many = step("c4a", *((7 if i % 16 == 3 else 0, 1) for i in range(1031)), topk="holes")
    yield _case(Area.DECODE, "requests-decode", "F7", says, many)
    says = "prefill of 258 requests in one step and one chunk, 1,032 rows, equals the oracle"
    many = step("c4a", *((0, 4),) * 258, topk="holes", extra_rows=200)
    yield _case(Area.PREFILL, "requests-prefill", "F7", says, many)
    for area, phase in PHASE.items():
        says = f"{area.value} of rows with 8,320 keys, of which the last seven outweigh all others, equals the oracle"
        inputs = call(phase, "loud", "c128a", columns=8192, rows=3, placements=(PagePlacement(64), PagePlacement(2)))
        yield _case(area, f"keys-8320-{area.value}", "F7 M1", says, inputs)


def _apart(area: Area) -> Iterator[Case]:
    """Rows of tensors that are slices of wider ones."""
    of = area.value
    says = f"{of}: rows of q, out and lse lie apart, one at a time, and memory next to them stays"
    single = call(PHASE[area], "holes", rows=5, sinks=SINKS)
    yield _case(area, f"apart-call-{of}", "A7 F6", says, single, each_strided("q out lse", equals_oracle))
    says = f"{of}: rows of tables and of indices lie apart, one at a time, and of all tensors together"
    check = each_strided("topk_indices block_table all", equals_oracle)
    # short prompts, so that all are in one chunk and a table of several rows is read
    decode = area is Area.DECODE
    batch = BOTH[area] if decode else ONE_CHUNK
    inputs = step("c4a", *batch, select=65, topk="holes")
    yield _case(area, f"apart-step-{of}", "A7 A9" if decode else "A7", says, inputs, check)
    says = f"{of}, c128a: rows of block tables lie apart"
    two = ((300, 1), (140, 1)) if decode else ((130, 6), (140, 3))
    inputs = step("c128a", *two, extra_rows=0 if decode else 140)
    yield _case(area, f"apart-c128a-{of}", "A7", says, inputs, each_strided("block_table", equals_oracle))


def _shapes(area: Area) -> Iterator[Case]:
    """Numbers of heads and of selected entries, and sizes of pages: all are runtime values."""
    batch, of = BOTH[area], area.value
    for heads in sorted({*OTHER_HEADS, *HEAD_COUNTS}):
        says = f"{of} with {heads} heads equals the oracle"
        yield _case(area, f"heads-{heads}-{of}", "F5", says, step("c4a", *batch[:2], heads=heads))
    for select in (1, 3, 63, 64, 65):
        says = f"{of} with an indexer that keeps {select} of 75 entries equals the oracle"
        yield _case(area, f"topk-{select}-{of}", "F5", says, step("c4a", *batch, select=select))
    tokens = 1 if area is Area.DECODE else 2
    for select in INDEX_TOPKS:
        says = f"{of} of a model's {select} selected entries, of {select + 26}, equals the oracle"
        inputs = step("c4a", (4 * (select + 26), tokens), select=select)
        yield _case(area, f"topk-{select}-{of}", "F5", says, inputs)
    says = f"{of} with an index matrix of no columns sees the window alone"
    none = step("c4a", *batch, topk="none")
    yield _case(area, f"topk-0-{of}", "B4 F5", says, none, checks.without_columns)
    for swa, page_tokens in ((1, 256), (2, 4), (16, 8), (32, 64), (128, 128)):
        says = f"{of} on pages of {swa} and {page_tokens // 4} records equals the oracle"
        inputs = step("c4a", *batch, pages=(swa, page_tokens))
        yield _case(area, f"pages-{swa}-{page_tokens // 4}-{of}", "A4 F5", says, inputs)
    for page in PAGE_SIZES:
        # entries of the first request and the window of the second one are on two pages
        says = f"{of} of keys of two pages of each cache, with {page} records a page, equals the oracle"
        inputs = step("c4a", (4 * (page + 19), tokens), (page + 20, tokens), select=65, pages=(page, 4 * page))
        yield _case(area, f"pages-{page}-{page}-{of}", "A4 F5", says, inputs)
    says = f"{of} on pages of 64 and 1 records equals the oracle"
    yield _case(area, f"pages-64-1-{of}", "A4 F5", says, step("c128a", (700, 1), *batch[1:], pages=(64, 128)))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).rpartition(".")[2]
        for cache in ("ocp", "fp32" if dtype == torch.float32 else "bf16"):
            says = f"{of} of {name} queries on {cache} records equals the oracle, within what those formats lose"
            inputs = step("c4a", *batch, cache=cache, q_dtype=dtype)
            yield _case(area, f"dtype-{name}-{cache}-{of}", "M3", says, inputs)
    for kind in KINDS:
        odd = tiny_geometry(num_heads=3, head_dim=40, rope_dim=6, window=5, topk=3, ratios=(3, 5))
        says = f"{of} with other dims, window and ratios equals the oracle"
        inputs = step(kind, *batch, geometry=odd, layout=layout("ocp", odd), pages=(4, 30))
        yield _case(area, f"dims-{kind}-{of}", "F5", says, inputs)
    says = f"{of} with Flash's own 64 heads, 512 of 600 entries, outlier channels and poison equals the oracle"
    full = step("c4a", (2400, 1 if area is Area.DECODE else 2), heads=64, outliers=True, poison=0xFF)
    yield _case(area, f"flash-{of}", "M1 M2 C6", says, full)


def _pairs(area: Area) -> Iterator[Case]:
    """Window and compressed caches of two layouts."""
    batch, of = BOTH[area], area.value
    short = ((70, 1), (9, 1)) if area is Area.DECODE else ((0, 7), (63, 6))
    for first, second in (("fnuz", "ocp"), ("ocp", "fnuz"), ("ocp", "bf16"), ("interleaved", "ocp")):
        says = f"{of}: a window cache of {first} with a compressed one of {second}, each read its own way"
        inputs = step("c4a", *batch, cache=first, compressed=second)
        yield _case(area, f"pair-{first}-{second}-{of}", "C3", says, inputs)
    for name, (first, second) in V41_PAIRS.items():
        says = f"{of}: a window cache of {first} records with a compressed one of {second}, each read its own way"
        inputs = step("c4a", *batch, cache=first, compressed=second)
        yield _case(area, f"pair-{name}-{of}", "C3", says, inputs)
    for first, second in (("nvfp4", "nvfp4"), ("ocp", "nvfp4")):
        says = f"{of}: a window cache of {first} with a compressed one of {second}, each read its own way"
        # everything but the keys that queries name is NaN, padding of records too
        inputs = step("c4a", *short, cache=first, compressed=second, topk="holes", poison=0xFF)
        yield _case(area, f"pair-{first}-{second}-{of}", "C3", says, inputs)


def _contents(area: Area) -> Iterator[Case]:
    """Contents of caches and indices."""
    batch, of = BOTH[area], area.value
    fields: dict[str, Any]
    for index_lists, clause in (("holes", "A1"), ("garbage", "A2")):
        says = f"{of}: entries stand anywhere among {'-1' if index_lists == 'holes' else 'numbers that name nothing'}"
        # a chunk of prefill has several requests: short ones, so that their gathered rows fit
        requests = batch if area is Area.DECODE else (*batch, *ONE_CHUNK)
        inputs = step("c4a", *requests, select=65, topk=index_lists, dead_block=2**30)
        entry_clause = " A9" if area is Area.DECODE else ""
        yield _case(area, f"indexer-{index_lists}-{of}", clause + entry_clause, says, inputs)
    for cache in ("fnuz", "interleaved"):
        says = f"{of} on {cache} records equals the oracle"
        yield _case(area, f"layout-{cache}-{of}", "C2 C5", says, step("c4a", *batch, cache=cache))
    yield from _pairs(area)
    for ratio in (1, 2):
        says = f"{of}: entries of {ratio} tokens each, on V4.1's records, equal the oracle"
        for name in ("v41-v41", "v41-fp4-split"):
            first, second = V41_PAIRS[name]
            fields = {"cache": first, "compressed": second, "select": 65, "topk": "holes", "poison": 0xFF}
            yield _case(
                area, f"ratio-{ratio}-{name}-{of}", "F5 C3 C6", says, step("c4a", *batch, ratio=ratio, **fields)
            )
    for cache, byte in (("ocp", 0xFF), ("fnuz", 0x80), ("bf16", 0xFF), ("v41", 0xFF), ("v41-fp4", 0xFF)):
        window, entries = V41_PAIRS.get(cache, (cache, cache))
        says = f"{of}: bytes 0x{byte:02X} over everything that no query names change no bit of the answer"
        last = (40, 3, 2) if area is Area.PREFILL else (40, 1, 1)
        fields = {"cache": window, "compressed": entries, "topk": "holes", "select": 65, "extra_rows": 2}
        inputs = step("c4a", *batch, last, **fields)
        check = checks.same_bits(f"with 0x{byte:02X} everywhere else", {"poison": byte})
        yield _case(area, f"poison-{cache}-{of}", "C6 B2", says, inputs, check)
    says = f"{of}: pages in another order, further apart, with others between them, give the same bits"
    moved = ({"pages_seed": 5}, {"page_padding": 4608}, {"spare_pages": 11, "pages_seed": 9}, {"dead_block": 0})
    for kind in ("swa", "c4a", "c128a"):
        check = checks.same_bits("on other pages", *moved)
        yield _case(area, f"moved-{kind}-{of}", "C4 C7", says, step(kind, *batch), check)
    says = f"{of} of keys with outlier channels and large sinks equals the oracle"
    for kind in KINDS:
        inputs = step(kind, *batch, outliers=True, sinks=SINKS)
        yield _case(area, f"magnitudes-{kind}-{of}", "M2 S5", says, inputs)
    says = f"{of} of 640 keys that have most in common, so that sums grow and a biased one shows, equals the oracle"
    inputs = step("c4a", (2100, 1) if area is Area.DECODE else (2100, 2), common=4.0)
    yield _case(area, f"alike-{of}", "M4", says, inputs)
    padding = tuple((prefix, n, n) for prefix, n, *_ in batch)
    says = f"{of}: a batch of nothing but padding, as a graph is captured with, gives zeros"
    inputs = step("c4a", *padding, poison=0xFF, topk="garbage", extra_rows=3)
    yield _case(area, f"padding-{of}", "B2 B3", says, inputs)
    says = f"{of}: rows of padding between others are exactly 0, and the others unharmed"
    some = tuple((prefix, n, n if i % 2 else 0) for i, (prefix, n, *_) in enumerate(batch))
    yield _case(area, f"padded-rows-{of}", "B2", says, step("c128a", *some, extra_rows=5))


def _sinks(area: Area) -> Iterator[Case]:
    batch, of = BOTH[area], area.value
    clause = "S1" if area is Area.DECODE else "S2"
    for kind in KINDS:
        says = f"{of}, {kind}: another sink changes every output and no lse"
        yield _case(area, f"sink-matters-{kind}-{of}", clause, says, step(kind, *batch), checks.sink_matters)
    says = f"{of}: sinks of -inf, +inf, 20, -20, 10000, -10000, 0 and 1.5, one a head, equal the oracle"
    yield _case(area, f"sink-values-{of}", f"{clause} S3 S4 S5 S6", says, step("c4a", *batch, sinks=SINKS))
    says = f"{of}: sinks of -inf are no sinks, bit for bit"
    check = checks.same_bits("with sinks of -inf", {"sinks": [-math.inf] * 8})
    yield _case(area, f"sink-none-{of}", "S3", says, step("c4a", *batch, sinks=None), check)
    says = f"{of}: sinks of +inf leave exactly 0, and the lse as it is"
    inputs = step("swa", *batch, sinks=[math.inf] * 8)
    yield _case(area, f"sink-infinite-{of}", "S4 L2", says, inputs)


def _calls(area: Area) -> Iterator[Case]:
    phase, of = PHASE[area], area.value
    patterns = (
        ("plain", "A6 M1", "keys in any order, in index rows of any stride"),
        ("behind", "A3", "slots of keys and garbage past the length are not looked at"),
        ("holes", "A1", "-1 among the slots is absent: no key, not a zero key"),
        ("outside", "A2", "indices outside the cache are absent"),
        ("empty", "B1 B4", "rows, and segments of rows, without keys: exactly 0, lse -inf"),
        ("twice", "A8", "a slot that a row lists twice counts twice"),
    )
    for pattern, clauses, what in patterns:
        for kind in ("swa", "c4a"):
            inputs = call(phase, pattern, kind, sinks=SINKS if pattern in ("empty", "plain") else None)  # type: ignore[arg-type]
            name = f"call-{pattern}-{kind}-{of}"
            yield _case(area, name, f"{clauses} F6", f"{of}, {kind}: {what}", inputs)
    says = f"{of}: a compressed segment of no columns, and one of a single column"
    for columns in (0, 1):
        inputs = call(phase, "plain", columns=columns)
        yield _case(area, f"call-columns-{columns}-{of}", "B4 F5", says, inputs)
    for kind, sinks in (("swa", None), ("c4a", SINKS)):
        says = f"{of}, {kind}: logits of 113 and 170, and rows whose logits are all -113 or -170, give finite answers"
        yield _case(area, f"logits-{kind}-{of}", "M2", says, call(phase, "huge", kind, sinks=sinks))
    says = f"{of}: a softmax scale of 0.1, instead of head_dim ** -0.5, is the one that is used"
    yield _case(area, f"softmax-scale-{of}", "M1", says, call(phase, "plain", softmax_scale=0.1, sinks=SINKS))
    says = f"{of}: pages of bf16 rows lie further apart than their rows ask for"
    strided = call(phase, "plain", cache="bf16", placements=(PagePlacement(64, 4608), PagePlacement(32, 4096)))
    yield _case(area, f"gaps-bf16-{of}", "C4", says, strided)
    for count in (2, 3, 8):
        says = f"{of}: keys dealt to {count} shards, some empty, merge by lse, and then with the sink, to the whole"
        inputs = call(phase, "holes", sinks=SINKS)
        yield _case(area, f"shards-{count}-{of}", "L1 L2 L4 B1", says, inputs, checks.sharded(count), needs_lse=True)
    says = f"{of}: the lse is fp32, natural, without the sink, -inf for a row without keys"
    inputs = call(phase, "empty", sinks=[20.0] * 8)
    yield _case(area, f"lse-{of}", "L1 L2 B1", says, inputs, needs_lse=True)
    says = f"{of}: not asking for the lse changes no bit of the output"
    yield _case(area, f"lse-absent-{of}", "L3", says, step("c4a", *BOTH[area]), checks.without_lse, needs_lse=True)
    says = f"{of}: max_logits are the largest scaled logits, sink left out, -inf without keys; asking changes no bit"
    inputs = call(phase, "empty", sinks=[20.0] * 8)
    yield _case(area, f"max-logits-{of}", "L5", says, inputs, checks.largest_logits)
    says = f"{of}: rows without keys have the lse that the call says; saying it changes nothing else"
    yield _case(area, f"lse-empty-{of}", "L6", says, call(phase, "empty"), checks.lse_of_empty_rows, needs_lse=True)
    for cache in ("ocp", "fnuz", "interleaved", "v41", "v41-split", "nvfp4"):
        says = f"{of} reads all 256 codes of {cache} under 236 scale bytes exactly"
        if cache == "nvfp4":
            says = f"{of} reads all 16 codes of {cache} under every scale byte exactly"
        inputs = EveryCode.of(phase, cache)
        yield _case(area, f"codes-{cache}-{of}", "C2", says, inputs, reads_every_code)
    for cache in ("ocp", "v41"):
        says = f"{of} reads all 256 codes of {cache} under scale bytes 0 to 9, which no writer of ours emits"
        inputs = EveryCode.of(phase, cache, SMALLEST_SCALES)
        yield _case(area, f"codes-{cache}-smallest-{of}", "C2", says, inputs, reads_every_code)
    # many rows, and so few that a backend may have other kernels for them
    for (rows, copies, name), cache in product(((24, 640, ""), (2, 320, "-few")), ("ocp", "v41")):
        says = f"{of}, {rows} rows of up to {copies} copies: reads keys of {cache} exactly whose columns differ in size"
        inputs = EveryCode.repeated(phase, cache, rows, copies)
        yield _case(area, f"codes-{cache}-copies{name}-{of}", "C2 C9", says, inputs, reads_every_code)
