"""Cases of the compressor: states by position, entries from the states of their window, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import numpy as np
import torch

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import complete
from dsv4attn.testing import oracle_layer
from dsv4attn.testing.case import Area, Bench, Case, Measure, Wrong
from dsv4attn.testing.check_compressor import CompressorStep, Span, run_step
from dsv4attn.testing.factories import flash, layout
from dsv4attn.testing.oracle_cache import OracleCache, place_of
from dsv4attn.testing.random_step import tiny_geometry
from dsv4attn.testing.tolerances import U8, found

__all__ = ["compressing", "compressor_cases", "index_layout", "saves_and_compresses"]

LONG = ((69_974, 10), (65_535, 1), (65_528, 17))
"""Requests with positions that need more than 16 bits."""


def index_layout(name: str, dim: int = 128, rope: int = 64) -> KVCacheLayout:
    """A layout of index keys by its short name: fp8, fnuz, mxfp4, bf16, fp32."""
    if name == "mxfp4":
        return KVCacheLayout.index_mxfp4(dim)
    if name in ("fp8", "fnuz"):
        return KVCacheLayout.index_fp8(dim, fp8_format=Fp8Format.FNUZ if name == "fnuz" else Fp8Format.OCP)
    return KVCacheLayout.rows(dim - rope, rope, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[name])


def compressing(kind: str, cache: str, **fields: object) -> CompressorStep:
    """A compressor of keys (`cache` of `case inputs.layout`), or with kind "index" of index keys (`index_layout`)."""
    indexer = kind == "index"
    made: dict[str, object] = {
        "geometry": flash("c4a" if indexer else kind),
        "layout": index_layout(cache) if indexer else layout(cache),
        "kind": "c4a" if indexer else kind,
        "indexer": indexer,
    }
    if kind == "c128a":
        made |= {"requests": ((0, 130), (127, 1), (250, 8), (300, 90)), "state_page": 8, "entry_page": 2}
    return CompressorStep(**{**made, **fields})  # type: ignore[arg-type]


# states


def saves_states(bench: Bench, inputs: CompressorStep) -> Measure:
    """The state of each token is in its slot, bit for bit, and no other byte is written."""
    wanted, oracle_cache = inputs.save(inputs.blank_states(), inputs.spans), inputs.blank_states()
    _save(bench, inputs, oracle_cache.cache, inputs.state_slots(inputs.spans))
    return _same_states(inputs, oracle_cache.bytes(), wanted.bytes())


def saves_only_its_slots(bench: Bench, inputs: CompressorStep) -> Measure:
    """Slots that are negative or do not exist, and tokens behind the slot mapping, write nothing."""
    tokens, capacity = inputs.tokens(inputs.spans), inputs.blank_states().cache.capacity - inputs.state_page
    slots = _wild(inputs.state_slots(inputs.spans)[:-3], capacity)
    wanted, oracle_cache = inputs.blank_states(), inputs.blank_states()
    live = [i for i, slot in enumerate(slots) if 0 <= slot < capacity]
    wanted.write(slots[live], np.stack([inputs.state(*tokens[i]) for i in live]))
    # a cache within a larger one, whose last page is not its own
    _save(bench, inputs, PagedKVCache(oracle_cache.cache.tensor[:-1], inputs.state_layout), slots)
    return _same_states(inputs, oracle_cache.bytes(), wanted.bytes())


def _save(bench: Bench, inputs: CompressorStep, cache: PagedKVCache, slots: np.ndarray) -> None:
    kv, score = inputs.projected(inputs.spans)
    positions = inputs.tensor(np.array([p for _, p in inputs.tokens(inputs.spans)], dtype=np.int64))
    ape = inputs.tensor(inputs.ape, torch.float32)
    before = kv.clone(), score.clone()
    complete(bench.backend).layer_ops.save_partial_states(kv, score, ape, positions, cache, inputs.tensor(slots))
    if not (torch.equal(kv, before[0]) and torch.equal(score, before[1])):
        raise Wrong("kv or scores were changed")


def _wild(slots: np.ndarray, capacity: int) -> np.ndarray:
    """Slots of which some do not exist. Cut to 32 bits, some of these would be slots that no token has."""
    free = np.setdiff1d(np.arange(capacity), slots)
    slots = np.where(slots < capacity, slots, -1)
    slots[:8] = [-1, -7, capacity, 2**40, 2**32 + free[0], -(2**32) + free[1], capacity + 3, -(2**63)]
    return slots


def _same_states(inputs: CompressorStep, now: U8, wanted: U8) -> Measure:
    if np.array_equal(now, wanted):
        return Measure()
    page, byte = (int(axis[0]) for axis in np.nonzero(now != wanted))
    size = inputs.state_layout.record_bytes
    where = f"float {byte % size // 4}" if byte < size * inputs.state_page else "no float at all"
    slot = f"slot {page * inputs.state_page + byte // size}"
    raise Wrong(f"{int((now != wanted).sum())} bytes of states differ, first in {slot}, {where} of {size // 4}")


# entries


def _prepared(inputs: CompressorStep) -> OracleCache:
    """The states of the step and of the tokens before it, as the oracle saves them."""
    return inputs.save(inputs.blank_states(), [*inputs.earlier, *inputs.spans])


def compresses(bench: Bench, inputs: CompressorStep) -> Measure:
    """Entries that the step completes are those of the oracle; states stay as they are."""
    states, entries = _prepared(inputs), inputs.blank_entries()
    before = states.bytes(), entries.bytes()
    run_step(bench, inputs, states, entries, inputs.spans)
    _same_states(inputs, states.bytes(), before[0])
    return inputs.judge_entries(entries, before[1], inputs.completed(inputs.spans))


def compresses_only_its_slots(bench: Bench, inputs: CompressorStep) -> Measure:
    """Tokens whose slot is negative or does not exist, and tokens behind the slot mapping, store no entry."""
    states, entries = _prepared(inputs), inputs.blank_entries()
    slots, before = inputs.entry_slots(inputs.spans), entries.bytes()
    ends, capacity = np.flatnonzero(slots >= 0), entries.cache.capacity
    free = np.setdiff1d(np.arange(capacity), slots)
    dropped = [-1, -7, capacity, 2**40, 2**32 + int(free[0]), capacity + 3]
    slots[ends[: len(dropped)]] = dropped
    short = slots[: ends[-1]]
    reached = [end for end in ends[len(dropped) :] if end < len(short)]
    if not reached:
        raise ValueError("the case input leaves no entry to store")
    run_step(bench, inputs, states, entries, inputs.spans, slots=short)
    tokens = inputs.tokens(inputs.spans)
    return inputs.judge_entries(entries, before, [(tokens[i][0], tokens[i][1] // inputs.ratio) for i in reached])


def saves_and_compresses(bench: Bench, inputs: CompressorStep, *, padded: bool = False) -> Measure:
    """A step saves its states and makes its entries, from these and from states that were there before.

    padded: whether rows of padding stand before and after its tokens.
    """
    states, entries = inputs.save(inputs.blank_states(), inputs.earlier), inputs.blank_entries()
    before = entries.bytes()
    run_step(bench, inputs, states, entries, inputs.spans, values=inputs.projected(inputs.spans), padded=padded)
    _same_states(inputs, states.bytes(), _prepared(inputs).bytes())
    return inputs.judge_entries(entries, before, inputs.completed(inputs.spans))


def stores_nothing(bench: Bench, inputs: CompressorStep) -> Measure:
    """A step without tokens, and one whose tokens complete no entry, store none."""
    states, entries = _prepared(inputs), inputs.blank_entries()
    before = states.bytes(), entries.bytes()
    none = [(0, range(0))]
    run_step(bench, inputs, states, entries, none, values=inputs.projected(none))
    incomplete = [
        (i, range(before, before + 1)) for i, (before, _) in enumerate(inputs.requests) if (before + 1) % inputs.ratio
    ]
    run_step(bench, inputs, states, entries, incomplete)
    _same_states(inputs, states.bytes(), before[0])
    return inputs.judge_entries(entries, before[1], [])


def any_cut(*cuts: Sequence[int]) -> Callable[[Bench, CompressorStep], Measure]:
    """However the tokens of a request are cut into steps, the bytes of states and entries are the same.

    cuts: sizes of steps, again and again until all tokens are through.
    """

    def check(bench: Bench, inputs: CompressorStep) -> Measure:
        results = []
        for sizes in ((2**20,), *cuts):
            states, entries = inputs.blank_states(), inputs.blank_entries()
            before = entries.bytes()
            for spans in _steps(inputs, sizes):
                run_step(bench, inputs, states, entries, spans, values=inputs.projected(spans))
            results.append((states.bytes(), entries.bytes()))
            measure = inputs.judge_entries(entries, before, inputs.completed(inputs.spans))
        _same_states(inputs, results[0][0], inputs.save(inputs.blank_states(), inputs.spans).bytes())
        for sizes, (states_now, entries_now) in zip(cuts, results[1:], strict=True):
            _require_same(f"in steps of {', '.join(map(str, sizes))} tokens", states_now, results[0][0], "states")
            _require_same(f"in steps of {', '.join(map(str, sizes))} tokens", entries_now, results[0][1], "entries")
        return measure

    return check


def _steps(inputs: CompressorStep, sizes: Sequence[int]) -> Iterator[list[Span]]:
    """Steps of all requests; request i begins with the i-th size."""
    done = [before for before, _ in inputs.requests]
    turn = 0
    while any(done[i] < before + count for i, (before, count) in enumerate(inputs.requests)):
        spans = []
        for i, (before, count) in enumerate(inputs.requests):
            end = min(done[i] + sizes[(turn + i) % len(sizes)], before + count)
            spans.append((i, range(done[i], end)))
            done[i] = end
        yield spans
        turn += 1


def _require_same(what: str, now: U8, wanted: U8, name: str) -> None:
    if not np.array_equal(now, wanted):
        page, byte = (int(axis[0]) for axis in np.nonzero(now != wanted))
        raise Wrong(f"{what}: {int((now != wanted).sum())} bytes of {name} differ, first byte {byte} of page {page}")


def replays(bench: Bench, inputs: CompressorStep) -> Measure:
    """Drafts that are replaced, and tokens that are computed again, leave the bytes of one pass."""
    plain = inputs.blank_states(), inputs.blank_entries()
    run_step(bench, inputs, *plain, inputs.spans, values=inputs.projected(inputs.spans))
    states, entries = inputs.blank_states(), inputs.blank_entries()
    drafts = attrs.evolve(inputs, seed=inputs.seed + 1)
    for begin, end, values in ((0, 6, inputs), (6, 11, drafts), (6, 9, inputs), (9, 13, drafts), (5, 2**20, inputs)):
        spans = [(i, span[begin:end]) for i, span in inputs.spans]
        run_step(bench, inputs, states, entries, spans, values=values.projected(spans))
    _require_same("after drafts and a replay", states.bytes(), plain[0].bytes(), "states")
    _require_same("after drafts and a replay", entries.bytes(), plain[1].bytes(), "entries")
    return Measure()


def unused_bytes(bench: Bench, inputs: CompressorStep) -> Measure:
    """Whatever bytes belong to no state, entries have the same bytes."""
    results = []
    for byte in (0xFF, 0x00, 0x7F):
        other = attrs.evolve(inputs, unused=byte)
        states, entries = _prepared(other), other.blank_entries()
        before = entries.bytes()
        run_step(bench, other, states, entries, other.spans)
        other.judge_entries(entries, before, other.completed(other.spans))
        results.append(entries.bytes())
        _require_same(f"over unused bytes of 0x{byte:02X}", results[-1], results[0], "entries")
    return Measure()


def moved(bench: Bench, inputs: CompressorStep) -> Measure:
    """Which pages hold a request, and how far apart they are, changes no byte of an entry."""
    results = []
    for other in (inputs, attrs.evolve(inputs, gap=4608)):
        states, entries = _prepared(other), other.blank_entries()
        before = entries.bytes()
        run_step(bench, other, states, entries, other.spans)
        other.judge_entries(entries, before, other.completed(other.spans))
        page = inputs.layout.page_bytes(inputs.entry_page)
        results.append(entries.bytes()[:, :page])
    _require_same("with pages further apart", results[1], results[0], "entries")
    return Measure()


def spoils_own_entries(bench: Bench, inputs: CompressorStep) -> Measure:
    """A NaN in kv or in a score of a token makes the entries NaN that it counts in, and harms no other."""
    clean = inputs.blank_states(), inputs.blank_entries()
    run_step(bench, inputs, *clean, inputs.spans, values=inputs.projected(inputs.spans))
    tokens, read = inputs.tokens(inputs.spans), {}
    for number, (token, half, part) in enumerate(((6, 0, 0), (6, 1, 1), (9, 1, 0), (11, 0, 1))):
        request, position = tokens[token]
        channel = (half if inputs.overlap else 0) * inputs.dim + 5 + number
        values = inputs.projected(inputs.spans)
        values[part][token, channel] = torch.nan
        states, entries = inputs.blank_states(), inputs.blank_entries()
        run_step(bench, inputs, states, entries, inputs.spans, values=values)
        name = f"a NaN {'score' if part else 'kv'} of token {position} in channel {channel}"
        for owner, entry in inputs.completed(inputs.spans):
            window = oracle_layer.entry_window(entry, inputs.ratio, overlap=inputs.overlap)
            hit = owner == request and (position, half if inputs.overlap else 0) in window
            slot = int(inputs.entry_pages.slots(owner, [entry])[0])
            place = slot // inputs.entry_page, place_of(inputs.layout, slot % inputs.entry_page, inputs.entry_page)
            record = entries.bytes()[place]
            if hit and not np.isnan(found(record, inputs.layout)).any():
                raise Wrong(f"{name}: entry {entry}, which it counts in, does not read as NaN")
            if not hit and not np.array_equal(record, clean[1].bytes()[place]):
                raise Wrong(f"{name}: entry {entry} of request {owner} changed, and the token does not count in it")
            read[number, hit] = True
    if not all((number, True) in read for number in range(4)):
        raise ValueError("the case input leaves no entry for a NaN")
    return Measure()


def compressor_cases() -> Iterator[Case]:
    """All cases of the compressor."""
    for kind, name in (("c4a", "ocp"), ("c128a", "ocp"), ("index", "fp8")):
        inputs = compressing(kind, name)
        says = f"{kind}: kv, and scores with the bias of their place in the window, are saved bit for bit"
        yield _case(f"states-{kind}", "K1", says, inputs, saves_states)
    says = "slots of states that are negative or do not exist are skipped, and no other byte is written"
    yield _case("states-skips", "K1 K7", says, compressing("index", "fp8", gap=4608), saves_only_its_slots)
    for kind, caches in (
        ("c4a", ("ocp", "fnuz", "interleaved", "bf16", "fp32")),
        ("c128a", ("ocp", "bf16")),
        ("index", ("fp8", "fnuz", "mxfp4", "bf16", "fp32")),
    ):
        for cache in caches:
            says = f"{kind}: entries are compressed, normalised, rotated and written to {cache} records"
            yield _case(f"compress-{kind}-{cache}", "K2 K3 K4", says, compressing(kind, cache), compresses)
    says = "the first entry of a request has no window before its own, whatever stands in the pages"
    first = compressing("c4a", "ocp", requests=((0, 4), (2, 2), (3, 1), (4, 4)))
    yield _case("compress-first", "K2", says, first, compresses)
    says = "states and entries at positions beyond 65,536 are found by position, and entries are rotated there"
    for kind, cache in (("c4a", "ocp"), ("index", "fp8")):
        inputs = compressing(kind, cache, requests=LONG)
        yield _case(f"compress-positions-{kind}", "K2 K3", says, inputs, compresses)
    says = "positions beyond 65,536 have the biases of their places in the window"
    yield _case("states-positions", "K1", says, compressing("c128a", "ocp", requests=((65_500, 70),)), saves_states)
    says = "an eps of 0.02, beside kv so small that it shows, is the one that is added"
    yield _case("compress-eps", "K3", says, compressing("c4a", "ocp", size=0.02, eps=0.02), compresses)
    says = "a weight of the norm in bf16 counts as the same numbers in fp32, where the steps take one"
    halved = compressing("c128a", "ocp", norm_dtype=torch.bfloat16)
    yield _case("compress-norm-bf16", "K3", says, halved, compresses)
    says = "slots of entries that are negative or do not exist are skipped, and no other byte is written"
    many = compressing("index", "fp8", requests=((0, 33), (4, 20)), gap=4608)
    yield _case("compress-skips", "K7", says, many, compresses_only_its_slots)
    says = "a step without tokens, or without the last token of a window, leaves both caches as they are"
    yield _case("compress-none", "K7", says, compressing("c4a", "ocp"), stores_nothing)
    for kind, cache in (("c4a", "ocp"), ("index", "mxfp4")):
        says = f"{kind}: pages of states and of entries lie further apart, and entries are the same"
        yield _case(f"compress-gaps-{kind}", "K2 K4", says, compressing(kind, cache), moved)
    says = "NaN or not, bytes of the state pages that belong to no state never reach an entry"
    for kind in ("c4a", "c128a"):
        yield _case(f"compress-unused-{kind}", "K8", says, compressing(kind, "bf16"), unused_bytes)
    for kind, cache, requests in (
        ("c4a", "ocp", ((0, 21), (0, 10))),
        ("index", "fp8", ((0, 33), (0, 14), (0, 3))),
        ("c128a", "ocp", ((0, 258),)),
    ):
        says = f"{kind}: steps of any sizes leave the same bytes in states and entries"
        cuts = (16, 7, 100, 1), (128,) if kind == "c128a" else (1,)
        inputs = compressing(kind, cache, requests=requests)
        yield _case(
            f"cuts-{kind}", "K5", says, inputs, any_cut((3, 1, 5, 2, 4), *cuts) if kind != "c128a" else any_cut(*cuts)
        )
    for kind, cache in (("c4a", "bf16"), ("index", "fp8")):
        says = f"{kind}: drafts that are replaced, and tokens computed again, leave the bytes of one pass"
        yield _case(f"replay-{kind}", "K6", says, compressing(kind, cache, requests=((0, 21), (0, 19))), replays)
    for kind, cache in (("c4a", "ocp"), ("index", "fp8"), ("index", "mxfp4")):
        says = f"{kind}: a NaN of a token reaches the entries that the token counts in, and no other"
        inputs = compressing(kind, cache, requests=((0, 24), (0, 9)))
        yield _case(f"compress-nan-{kind}-{cache}", "K8", says, inputs, spoils_own_entries)
    yield from _stale_cases()
    says = "1,031 tokens of 70 requests are saved and compressed in one step"
    many = compressing("index", "fp8", requests=(*[(i, 4) for i in range(69)], (40, 755)))
    yield _case("compress-1031", "K2 F7", says, many, saves_and_compresses)
    says = "an entry of another model, of 32 dims, is compressed and rotated"
    tiny = CompressorStep(geometry=tiny_geometry(), layout=KVCacheLayout.rows(24, 8))
    yield _case("dims-compress", "K2 K3 F5", says, tiny, compresses)


def _stale_cases() -> Iterator[Case]:
    """Rows of padding around the tokens."""
    for kind, cache in (("c4a", "ocp"), ("c128a", "ocp"), ("index", "fp8")):
        says = f"{kind}: rows of padding save no state and store no entry, and no position of them is looked up"
        check = partial(saves_and_compresses, padded=True)
        yield _case(f"no-token-compress-{kind}", "B5", says, compressing(kind, cache), check)


def _case(
    name: str, clauses: str, says: str, inputs: CompressorStep, check: Callable[[Bench, CompressorStep], Measure]
) -> Case:
    return Case(name=name, area=Area.LAYER, clauses=clauses, says=says, inputs=inputs, check=check)
