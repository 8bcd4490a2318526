"""What sums of backends lose on this machine, and what cut graphs cost: `python docs/numerics_of_backends.py`.

Three parts, each against float64 of the same stored codes, or against one captured graph:

    logits      index logits of fp8 codes, for keys and queries with a common mean, and the entries that they select
    attention   attention of a decode over 8,192 keys, with a common mean and without
    graphs      a decode layer in one graph, cut into several, and with eager attention between graphs (CUDA only)

`--out DIR` writes `numerics_of_backends.json` and `.txt` there. They have versions and the name of the device, but no
host name, path or serial number. Other libraries are measured too if they can be imported: FlashMLA and DeepGEMM, the
latter with CUDA_HOME set. On a CPU sizes are small; set TRITON_INTERPRET=1 for Triton's backends.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.launching import pdl
from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.selection import load_backend
from dsv4attn.tools.bench import whole_layer
from dsv4attn.tools.bench.accuracy import reference
from dsv4attn.tools.bench.attention_call import prepare_attention
from dsv4attn.tools.bench.cases import HEAD_DIM, PRESETS, WINDOW, KernelCase, with_topk
from dsv4attn.tools.bench.clock import Clock
from dsv4attn.tools.bench.index_ops import DIM, HEADS, PAGE, IndexInputs
from dsv4attn.tools.bench.inputs import Inputs, RandomNumbers, make_inputs, read_records
from dsv4attn.tools.bench.layer_ops import LayerOpCase
from dsv4attn.tools.bench.peers import PEERS

_KIND = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else ""
DEVICE = torch.device(_KIND, 0) if _KIND else torch.device("cpu")
PARTS = ("logits", "attention", "graphs")
REPORT = "numerics_of_backends"
_WITHOUT_PDL = "NUMERICS_WITHOUT_PDL"
"""Set in the process that measures layers without overlapping launches."""

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
Backends = Mapping[str, Backend]


def rows_of(part: str, found: list[Row]) -> Iterator[str]:
    """The rows of a part as lines of a table with aligned columns."""
    yield f"== {part}"
    if not found:
        return
    names = list(dict.fromkeys(name for row in found for name in row))
    cells = [names, *([shown(row.get(name, "")) for name in names] for row in found)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def shown(value: object) -> str:
    """A value of a table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def attempted(call: Callable[[], Row]) -> Row:
    """What a contender measured, or why it could not."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        return failed(error)


def failed(error: Exception) -> Row:
    """The row of what raised an error."""
    return {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}


def keep(found: list[Row], row: Row) -> None:
    """Add a row, and show it at once: a run that ends early has shown what it measured."""
    found.append(row)
    print(json.dumps(row), file=sys.stderr, flush=True)


def available(*names: str) -> dict[str, Any]:
    """The other libraries of these names that can be imported. Of the others it prints why not."""
    why = {name: PEERS[name].available() for name in names}
    for name, reason in why.items():
        if reason:
            print(f"{name}: {reason}", file=sys.stderr)
    return {name: PEERS[name] for name in names if not why[name]}


def ulps_of(exact: Tensor, bits: int) -> Tensor:
    """The distance of neighbouring numbers of a format with this many bits of significand, at each value."""
    return torch.exp2(torch.floor(torch.log2(exact.abs())) - (bits - 1))


# ---------------------------------------------------------------- index logits


@frozen
class IndexNumbers:
    """Of what queries and keys of a case are drawn.

    mean: mean of every dim of queries and keys, whose spread is 1.
    positive: whether the heads' weights are all positive. Otherwise they have both signs.
    """

    mean: float
    positive: bool

    def __str__(self) -> str:
        """As tables name it."""
        return f"mean {self.mean:g}, weights {'> 0' if self.positive else 'of both signs'}"


_FEW_HEADS = 4
"""Heads of the indexer on a CPU."""
INDEX_NUMBERS = [
    IndexNumbers(0.0, positive=False),
    IndexNumbers(0.0, positive=True),
    IndexNumbers(0.5, positive=True),
    IndexNumbers(2.0, positive=False),
    IndexNumbers(2.0, positive=True),
    IndexNumbers(8.0, positive=True),
]


def index_inputs(numbers: IndexNumbers, tokens: int, keys: int) -> tuple[IndexInputs, Tensor, Tensor]:
    """Inputs of one request, and the queries [T, Hi, Di] and keys [E, Di] in fp32 that they were rounded from."""
    case = LayerOpCase("index", "paged", str(numbers), 1, tokens, keys)
    random = RandomNumbers(DEVICE, seed=keys)
    raw_q = random.normal(1, tokens, HEADS if DEVICE.type != "cpu" else _FEW_HEADS, DIM) + numbers.mean
    raw_k = random.normal(keys, DIM) + numbers.mean
    weights = random.normal(*raw_q.shape[1:3])
    weights = weights.abs() if numbers.positive else weights
    table = random.pages(1, keys // PAGE)
    cache = PagedKVCache.allocate(KVCacheLayout.index_fp8(DIM), table.numel(), PAGE, DEVICE)
    entry = torch.arange(keys, device=DEVICE)
    page, place = table[:, entry // PAGE].long(), entry % PAGE
    store_index_keys(raw_k, cache, page[0] * PAGE + place)
    codes = cache.region("nope")[page, place].view(torch.float8_e4m3fn)
    scales = cache.region("scale")[page, place, 0]
    lens = torch.full((1, tokens), keys, dtype=torch.int32, device=DEVICE)
    nothing = torch.empty(0, device=DEVICE)
    q = raw_q.to(torch.float8_e4m3fn)
    return IndexInputs(case, q, weights, codes, scales, cache, table, lens, nothing), raw_q[0], raw_k


def by_torch(inputs: IndexInputs, *, out: torch.dtype) -> Tensor:
    """[T, E] logits by a bf16 product in torch, whose result has this type. Codes are exact in bf16."""
    q, k = inputs.q[0].to(torch.bfloat16), inputs.codes[0].to(torch.bfloat16)
    rows = []
    for of_token, weights in zip(q, inputs.weights, strict=True):
        product = torch.mm(of_token, k.T) if out is torch.bfloat16 else torch.mm(of_token, k.T, out_dtype=out)
        rows.append((torch.relu(product.float()) * weights[:, None]).sum(0) * inputs.scales[0])
    return torch.stack(rows)


def select(backend: Backend, inputs: IndexInputs, topk: int) -> Tensor:
    """[T, K] entries that a backend's `select_topk` writes."""
    tokens = inputs.case.tokens
    assert inputs.cache is not None
    out = torch.full((tokens, topk), -1, dtype=torch.int32, device=DEVICE)
    request = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    query = IndexQuery(inputs.q[0], inputs.weights)
    backend.layer_ops.select_topk(
        query, inputs.cache, TokenMap(inputs.table, request, inputs.lens[0]), out, inputs.case.keys
    )
    return out.long()


def share_that_differs(chosen: Tensor, best: Tensor, keys: int) -> float:
    """The share of entries [T, K] that are not among the best [T, K]."""
    is_best = torch.zeros(len(best), keys, dtype=torch.bool, device=DEVICE).scatter_(1, best, value=True)
    return 1.0 - float(is_best.gather(1, chosen).double().mean())


def deepest(chosen: Tensor, exact: Tensor, best: Tensor) -> float:
    """How far a selected score lies below the last one of the exact selection, relative to that one."""
    last = exact.gather(1, best).amin(-1)
    lowest = exact.gather(1, chosen).amin(-1)
    return float(((last - lowest) / last.abs()).max())


def index_contenders(backends: Backends) -> dict[str, Callable[[IndexInputs], Tensor]]:
    """Logits by their name: of backends, of DeepGEMM if it is there, and of products in torch."""

    def of_backend(backend: Backend) -> Callable[[IndexInputs], Tensor]:
        return lambda inputs: inputs.logits_call(backend)()

    found = {name: of_backend(backend) for name, backend in backends.items()}
    for name, peer in available("deep_gemm").items():
        found[name] = lambda inputs, peer=peer: peer._logits(inputs)()  # noqa: SLF001 - the bench's own call of it
    found["reference"] = of_backend(reference())
    found["torch bf16"] = lambda inputs: by_torch(inputs, out=torch.bfloat16)
    if DEVICE.type == "cuda":
        found["torch bf16, fp32 out"] = lambda inputs: by_torch(inputs, out=torch.float32)
    return found


@frozen(eq=False)
class ExactLogits:
    """Logits in float64.

    inputs: of the case.
    total: [T, E] float64.
    best: entries of the exact selection, by their number.
    """

    inputs: IndexInputs
    total: Tensor
    best: dict[int, Tensor]

    @classmethod
    def of(cls, inputs: IndexInputs, topks: tuple[int, ...]) -> ExactLogits:
        """Computed from the codes."""
        total = sum_of_heads(inputs, lambda head: exact_of_head(inputs, head))
        return cls(inputs, total, {topk: total.topk(topk).indices for topk in topks})

    def errors(self, logits: Tensor) -> Row:
        """Mean signed error and spread of logits [T, E], relative to the mean size and in ulps of fp32."""
        error, size = logits.double() - self.total, self.total.abs().mean()
        large = self.total.abs() > size / 16
        ulps = (error / ulps_of(self.total, 24))[large]
        return {
            "mean error": float(error.mean() / size),
            "spread": float(error.std() / size),
            "mean ulps": float(ulps.mean()),
            "ulps' spread": float(ulps.std()),
        }

    def selections(self, name: str, entries: Callable[[int], Tensor]) -> Row:
        """Share of entries that differ from the exact selection, and how far below it they are."""
        keys, row = self.inputs.case.keys, {}
        for topk, best in self.best.items():
            chosen = entries(topk)
            row[f"{name} {topk} differ"] = share_that_differs(chosen, best, keys)
            row[f"{name} {topk} depth"] = deepest(chosen, self.total, best)
        return row


def exact_of_head(inputs: IndexInputs, head: int) -> Tensor:
    """[T, E] float64: a head's sums over dims after the ReLU."""
    q, k = inputs.q[0, :, head].double(), inputs.codes[0].double()
    return torch.relu(q @ k.T) * inputs.scales[0].double()


def sum_of_heads(inputs: IndexInputs, of_head: Callable[[int], Tensor]) -> Tensor:
    """[T, E] float64: the weighted sum over heads of [T, E] each."""
    total = torch.zeros(inputs.case.tokens, inputs.case.keys, dtype=torch.float64, device=DEVICE)
    for head in range(inputs.weights.shape[1]):
        total += inputs.weights[:, head, None].double() * of_head(head).double()
    return total


def head_sums(exact: ExactLogits, logits: Callable[[IndexInputs], Tensor]) -> Row:
    """What the sum over heads adds to the error: logits beside the float64 sum of the same kernel's single heads.

    A single head is what the kernel gives where all other heads have weight 0.
    """
    inputs, errors = exact.inputs, []

    def of_head(head: int) -> Tensor:
        weights = torch.zeros_like(inputs.weights)
        weights[:, head] = 1
        sums, right = logits(evolve(inputs, weights=weights)).double(), exact_of_head(inputs, head)
        errors.append(((sums - right).mean() / right.mean().clamp_min(1e-30)).item())
        return sums

    of_heads = sum_of_heads(inputs, of_head)
    error = logits(inputs).double() - of_heads
    large = exact.total.abs() > exact.total.abs().mean() / 16
    ulps = (error / ulps_of(exact.total, 24))[large]
    return {
        "error of a head": statistics.mean(errors),
        "sum of heads, mean error": float(error.mean() / exact.total.abs().mean()),
        "sum of heads, mean ulps": float(ulps.mean()),
        "sum of heads, ulps' spread": float(ulps.std()),
    }


def index_rows(
    exact: ExactLogits, contenders: Mapping[str, Callable[[IndexInputs], Tensor]], backends: Backends
) -> Rows:
    """What each contender loses on a case: (its name, its row)."""
    inputs = exact.inputs

    def measured(name: str, call: Callable[[IndexInputs], Tensor]) -> Row:
        logits = call(inputs)
        row = exact.errors(logits) | exact.selections("top", lambda k: logits.topk(k).indices)
        if name in backends:
            row |= exact.selections("select", lambda k: select(backends[name], inputs, k))
        if name in (*backends, "deep_gemm"):
            row |= head_sums(exact, call)
        return row

    for name, call in contenders.items():
        yield name, attempted(partial(measured, name, call))


def before_rounding(exact: ExactLogits, q: Tensor, keys: Tensor) -> Row:
    """What rounding to codes changes: selections by queries [T, Hi, Di] and keys [E, Di] in fp32."""
    rows = [
        (weights[:, None] * torch.relu(of_token @ keys.T)).sum(0)
        for of_token, weights in zip(q, exact.inputs.weights, strict=True)
    ]
    logits = torch.stack(rows)
    return exact.selections("top", lambda k: logits.topk(k).indices)


def logits_part(backends: Backends, *, small: bool) -> list[Row]:
    """Index logits and selections against float64 of the same codes."""
    lengths = (256,) if small else (8192, 32768, 262144)
    tokens, topks = (2, (64,)) if small else (8, (512, 1024))
    contenders = index_contenders(backends)
    found: list[Row] = []
    for keys in lengths:
        for numbers in INDEX_NUMBERS:
            inputs, raw_q, raw_k = index_inputs(numbers, tokens, keys)
            exact, case = ExactLogits.of(inputs, topks), {"keys": keys, "case": str(numbers)}
            for name, row in index_rows(exact, contenders, backends):
                keep(found, {**case, "by": name} | row)
            keep(found, {**case, "by": "before rounding to codes"} | before_rounding(exact, raw_q, raw_k))
    return found


# ---------------------------------------------------------------- attention


KEYS = {
    "mean 0": (0.0, 1.0),
    "mean 1": (1.0, 1.0),
    "mean 4": (4.0, 1.0),
    "nearly alike": (0.0, 2.0**-6),
}
"""(mean of every dim of the keys, their spread). Keys that are nearly alike have a random key in common."""


def attention_inputs(mean: float, spread: float, requests: int, entries: int) -> Inputs:
    """A decode of some requests over the window and all entries of a c128a layer, with keys of these values."""
    preset = with_topk(PRESETS["flash_c128"], entries)
    case = KernelCase("decode", preset, f"{WINDOW + entries} keys", ((128 * entries + 126, 1),) * requests)
    inputs = make_inputs(case, DEVICE)
    random = RandomNumbers(DEVICE, seed=1)
    common = random.normal(HEAD_DIM) if spread < 1 else torch.full((HEAD_DIM,), mean, device=DEVICE)
    for segment in inputs.segments:
        cache = segment.cache
        for slots in torch.arange(cache.capacity, device=DEVICE).split(8192):
            keys = common + spread * random.normal(len(slots), HEAD_DIM)
            reference().quantize_and_insert_k_cache(keys.bfloat16(), cache, slots)
    return inputs


def exact_attention(inputs: Inputs) -> Tensor:
    """[T, H, D] float64 of the stored keys, one token at a time: softmax with a sink, and the weighted sum of keys."""
    outs = []
    for token, q in enumerate(inputs.q.double()):
        parts = []
        for segment in inputs.segments:
            slots = segment.slots.indices[token, : int(segment.slots.lens[token])]
            parts.append(read_records(segment.cache, slots).double())
        keys = torch.cat(parts)
        logits = inputs.layer.scale * (q @ keys.T)
        weights = torch.softmax(torch.cat([logits, inputs.sink.double()[:, None]], 1), 1)[:, :-1]
        outs.append(weights @ keys)
    return torch.stack(outs)


def attention_errors(out: Tensor, exact: Tensor) -> Row:
    """Mean signed error in ulps of bf16: of values, and of their sizes, which is negative if sums are cut off."""
    error, size = out.double() - exact, exact.square().mean().sqrt()
    large = exact.abs() > size / 16
    ulps = (error / ulps_of(exact, 8))[large]
    of_sizes = ulps * exact.sign()[large]
    return {
        "mean ulps": float(ulps.mean()),
        "of sizes": float(of_sizes.mean()),
        "uncertain by": float(of_sizes.std() / of_sizes.numel() ** 0.5),
        "ulps' spread": float(ulps.std()),
        "relative, of sizes": float((error * exact.sign())[large].mean() / exact.abs()[large].mean()),
        "relative error": float(error.norm() / exact.norm()),
    }


def attention_rows(inputs: Inputs, backends: Backends, peers: Mapping[str, Any]) -> Rows:
    """What each contender loses on a decode: (its name, its row)."""
    exact = exact_attention(inputs)

    def of_backend(backend: Backend, dtype: torch.dtype) -> Row:
        of_type = evolve(inputs, q=inputs.q.to(dtype))
        out = torch.empty_like(of_type.q)
        prepare_attention(backend, of_type, out)()
        return attention_errors(out, exact)

    def of_peer(peer: Any) -> Row:  # noqa: ANN401 - another library, as the bench calls it
        return attention_errors(peer.decode(inputs)(), exact)

    for name, backend in {**backends, "reference": reference()}.items():
        for dtype in (torch.bfloat16, torch.float32):
            yield f"{name}, {str(dtype).removeprefix('torch.')}", attempted(partial(of_backend, backend, dtype))
    for name, peer in peers.items():
        yield f"{name}, bfloat16", attempted(partial(of_peer, peer))
    yield "float64, rounded to bf16", attention_errors(exact.bfloat16(), exact)


def attention_part(backends: Backends, *, small: bool) -> list[Row]:
    """A decode over many keys against float64 of the stored keys."""
    requests, entries = (1, 384) if small else (4, 8192 - WINDOW)
    peers = available("flash_mla")
    found: list[Row] = []
    for name, numbers in KEYS.items():
        case = {"keys": WINDOW + entries, "case": name}
        for by, row in attention_rows(attention_inputs(*numbers, requests, entries), backends, peers):
            keep(found, {**case, "by": by} | row)
    return found


# ---------------------------------------------------------------- graphs

LAYERS = 8
"""Layers of a measured step: the same layer, called again and again."""


class Pieces:
    """A step as captured graphs that are replayed one after the other, with eager calls between some of them."""

    def __init__(self) -> None:
        """Nothing is captured yet."""
        self.calls: list[Callable[[], object]] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Begin to capture a graph."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def end(self) -> None:
        """End the graph that is captured, if one is."""
        if self._graph is not None:
            self._graph.capture_end()
            self.calls.append(self._graph.replay)
            self._graph = None

    def cut(self) -> None:
        """End the graph that is captured, if one is, and begin the next one."""
        if self._graph is not None:
            self.end()
            self.begin()

    def then_cut(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with a cut after it."""

        def run(*arguments: Any) -> Any:  # noqa: ANN401 - those of the call
            result = call(*arguments)
            self.cut()
            return result

        return run

    def eagerly(self, call: Callable[..., Any], *, last: bool = False) -> Callable[..., Any]:
        """The call outside of graphs. last: whether a graph begins after it."""

        def run(*arguments: Any) -> Any:  # noqa: ANN401 - those of the call
            self.end()
            result = call(*arguments)
            self.calls.append(lambda: call(*arguments))
            if last:
                self.begin()
            return result

        return run

    def run(self) -> None:
        """Replay everything in its order."""
        for call in self.calls:
            call()


PLACES = (
    ("layer", "_project"),
    ("attention", "attend_from"),
    ("attention", "insert_into"),
    ("layer", "_select"),
)
"""Methods of a layer and of its attention after which a step is cut, in the order in which cuts are added."""
EAGER = {
    "selection and attention": PLACES[1::2][::-1],
    "insert to attention": (PLACES[2], ("layer", "_compress"), PLACES[3], PLACES[1]),
}
"""What engines run eagerly between piecewise graphs."""


def graph_forms(kind: LayerKind) -> dict[str, tuple[str, int]]:
    """Forms of a step by their names: what is done with the layers, and how often each is cut in the middle."""
    most = 4 if kind is LayerKind.CSA else 3
    return {
        "one graph": ("one graph", 0),
        "a graph a layer": ("a graph a layer", 0),
        **{f"{cuts} cut{'s' if cuts > 1 else ''} in a layer": ("one graph", cuts) for cuts in range(1, most + 1)},
        **{f"eager {what}": (what, 0) for what in EAGER},
        "all eager": ("no graph", 0),
    }


def hooks(pieces: Pieces, layer: DeepseekV4Attention, how: str, cuts: int) -> Iterator[tuple[Any, str, Any]]:
    """What stands for methods of a layer while it is captured: (object, name, the method with cuts around it)."""
    objects = {"layer": layer, "attention": layer.attention}
    for owner, name in PLACES[:cuts]:
        yield objects[owner], name, pieces.then_cut(getattr(objects[owner], name))
    for owner, name in EAGER.get(how, ()):
        method = getattr(objects[owner], name)
        yield objects[owner], name, pieces.eagerly(method, last=name == "attend_from")


def captured(prepared: Any, how: str, cuts: int) -> Callable[[], None]:  # noqa: ANN401 - the bench's prepared layer
    """A step of LAYERS calls of a layer, ready to be run again and again."""
    layer, pieces = prepared.layer, Pieces()

    def step() -> None:
        with set_forward_context(prepared.metadata):
            for number in range(LAYERS):
                if how == "a graph a layer" and number:
                    pieces.cut()
                layer(prepared.hidden, prepared.positions)

    def replay() -> None:
        with set_forward_context(prepared.metadata):
            pieces.run()

    if how == "no graph":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        gc.collect()
        replaced = list(hooks(pieces, layer, how, cuts))
        for owner, name, method in replaced:
            setattr(owner, name, method)
        try:
            pieces.begin()
            step()
            pieces.end()
        finally:
            for owner, name, _ in replaced:
                delattr(owner, name)
        torch.cuda.synchronize()
    return replay


def wall(run: Callable[[], None], repeat: int = 5) -> float:
    """Seconds of a step by the clock of the host, in a row of steps."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeat):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeat


def graph_rows(clock: Clock, prepared: Any, kind: LayerKind, rounds: int) -> Rows:  # noqa: ANN401 - as in `captured`
    """Microseconds of a layer in each form: (the form, its row)."""
    calls = {}
    for form, (how, cuts) in graph_forms(kind).items():
        try:
            calls[form] = captured(prepared, how, cuts)
        except Exception as error:  # noqa: BLE001 - whatever capturing raises
            yield form, failed(error)
            torch.cuda.synchronize()
    spreads = clock.times(list(calls.values()), rounds)
    for (form, call), spread in zip(calls.items(), spreads, strict=True):
        row = {
            "us a layer": spread.median,
            "more than the first form": spread.median - spreads[0].median,
            "p10": spread.p10,
            "p90": spread.p90,
            "by the host's clock": wall(call),
        }
        micro = {name: 1e6 * seconds / LAYERS for name, seconds in row.items()}
        yield form, micro | {"host visible": spread.exposed}


def graphs_part(backends: Backends, *, rounds: int = 9) -> list[Row]:
    """A decode layer in one graph, in several, and with eager attention between graphs."""
    clock = Clock(DEVICE)
    found: list[Row] = []
    for name, backend in backends.items():
        for kind in (LayerKind.CSA, LayerKind.HCA):
            for tokens in (8, 64):
                case = whole_layer.LayerCase(kind, tokens, 1, 8192)
                prepared = whole_layer._prepared_layer(case, backend, DEVICE)  # noqa: SLF001 - in other graphs
                for form, row in graph_rows(clock, prepared, kind, rounds):
                    keep(found, {"kind": kind.value, "tokens": tokens, "by": name, "form": form} | row)
    return found


def loaded(text: str) -> Backend:
    """The backend of a name, or of a name and options, such as "sm90:index_sums=exact"."""
    name, _, options = text.partition(":")
    return load_backend(name, **dict(option.split("=") for option in options.split(":") if option))


def without_overlap(name: str) -> list[Row]:
    """The rows of `graphs_part` of a backend from a process whose kernels do not overlap."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--parts", "graphs", "--backends", name, "--out", folder]
        result = subprocess.run(  # noqa: S603 - this file
            command, env=os.environ | {_WITHOUT_PDL: "1"}, capture_output=True, text=True, check=False
        )
        if result.returncode:
            return [{"failed": result.stderr.strip().splitlines()[-1][:200]}]
        report = json.loads((Path(folder) / f"{REPORT}.json").read_text(encoding="utf-8"))
    rows: list[Row] = report["parts"]["graphs"]["rows"]
    return rows


# ---------------------------------------------------------------- report


def versions() -> dict[str, str]:
    """Versions of what is measured."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    with suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    return found


def main() -> None:
    """Run the parts, print their tables and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument(
        "--backends", default="", help="comma-separated, NAME or NAME:OPTION=VALUE; default: sm90,triton, or triton"
    )
    parser.add_argument("--out", type=Path, help="folder for the report")
    arguments = parser.parse_args()
    is_hopper = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0) and torch.version.hip is None
    names = [name for name in arguments.backends.split(",") if name] or (["sm90"] if is_hopper else []) + ["triton"]
    small, overlaps = DEVICE.type == "cpu", _WITHOUT_PDL not in os.environ
    if not overlaps:
        pdl._ARCHITECTURES = frozenset()  # noqa: SLF001 - there is no option: nobody needs it but this comparison
    backends = {name: loaded(name) for name in names}
    module: Any = torch.get_device_module(DEVICE)
    report: dict[str, Any] = {
        "device": platform.machine() if small else module.get_device_name(),
        "versions": versions(),
        "parts": {},
    }
    lines = [f"{report['device']}, {report['versions']}"]
    makers: dict[str, Callable[[], list[Row]]] = {
        "logits": lambda: logits_part(backends, small=small),
        "attention": lambda: attention_part(backends, small=small),
        "graphs": lambda: graphs_part({names[0]: backends[names[0]]}),
        "graphs without overlap": lambda: without_overlap(names[0]),
    }
    parts = [part for part in arguments.parts.split(",") if part != "graphs" or DEVICE.type == "cuda"]
    if "graphs" in parts and overlaps:
        parts.append("graphs without overlap")
    for part in parts:
        started = time.perf_counter()
        with torch.inference_mode():
            rows = makers[part]()
        seconds = time.perf_counter() - started
        report["parts"][part] = {"seconds": seconds, "rows": rows}
        lines += ["", *rows_of(f"{part}, {seconds:.0f} s", rows)]
        print("\n".join(lines), flush=True)
        lines.clear()
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{REPORT}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
