"""Times of whole layers from hidden states to hidden states, the price of deterministic ones, and their parts.

A layer of each kind of DeepSeek-V4-Flash, with random weights of its sizes, decodes a token of some sequences, and
takes a part of a prompt. Of the sequences of a decode every r-th, and one at least, completes an entry of r tokens.
Index keys are random, since a selection among equal scores takes longer. The other caches hold zeros: times do not
depend on them. Results are not judged here: tests and the conformance kit do that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, LayerKey
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.weights import AttentionWeights, HyperConnectionWeights, weight_shapes
from dsv4attn.core.reprs import counted, frozen
from dsv4attn.errors import ArgumentError
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.tools.bench.cases import PRESETS
from dsv4attn.tools.bench.clock import Clock
from dsv4attn.tools.bench.inputs import RandomNumbers
from dsv4attn.tools.bench.layer_parts import LayerPart, MarkedBackend, Marks, measured

_FLASH = ModelGeometry.preset("deepseek-v4-flash")


@frozen
class LayerCase:
    """A step of one layer.

    kind: kind of the layer.
    requests: sequences of the step.
    tokens: tokens of each sequence in the step.
    context: tokens of each sequence before the step; for decodes the largest number, see `contexts`.
    heads: query heads; fewer than the model's are those of a tensor-parallel rank.
    """

    kind: LayerKind
    requests: int
    tokens: int
    context: int
    heads: int = _FLASH.num_heads

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.kind.value + (f", {self.heads} heads" if self.heads != _FLASH.num_heads else "")

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"layer {self.layer}, {self.step}"

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of each sequence before the step. Those of decodes follow each other up to the one before `context`.

        With a `context` that is a multiple of the kind's ratio r, one token in r completes an entry, and one at least.
        """
        if self.tokens > 1:
            return (self.context,) * self.requests
        return tuple(range(self.context - self.requests, self.context))

    @property
    def completing(self) -> int:
        """Sequences that complete an entry in the step; 0 where a layer has none."""
        ratio = _FLASH.layer_of_kind(self.kind).compress_ratio
        if ratio == 1:
            return 0
        return sum((prefix + self.tokens) // ratio > prefix // ratio for prefix in self.contexts)

    @property
    def step(self) -> str:
        """What the step is, in words."""
        sequences = counted(self.requests, "sequence")
        new = counted(self.tokens, "new token") + " each" * (self.requests > 1)
        first, last = self.contexts[0], self.contexts[-1]
        contexts = f"{first:,} to {last:,}" if first < last else f"{last:,}"
        return f"{sequences}, {new}, {contexts} in the cache"


@frozen
class LayerTime:
    """Seconds of a layer: median of the rounds.

    layer: name of the layer.
    case: name of the case.
    plain_s: everyday.
    deterministic_s: with bits that depend on nothing but a token's own history; None if the backend cannot.
    phase: decode or prompt.
    step: what the step is, in words.
    parts: of the everyday layer, with hyper-connections around it; none where kernels cannot be seen.
    completing: sequences that complete an entry in the step.
    """

    layer: str
    case: str
    plain_s: float
    deterministic_s: float | None
    phase: str = ""
    step: str = ""
    parts: tuple[LayerPart, ...] = ()
    completing: int = 0

    def __str__(self) -> str:
        """One line."""
        price = ""
        if self.deterministic_s is not None:
            ratio = self.deterministic_s / self.plain_s
            price = f", deterministic {_ms(self.deterministic_s)} ({ratio:.2f} times as long)"
        return f"{self.case}: {_ms(self.plain_s)}{price}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


def layer_cases(heads: Sequence[int] = (), presets: Sequence[str] = tuple(PRESETS), *, small: bool) -> list[LayerCase]:
    """A decode and a part of a prompt on each kind of layer. small: for a CPU.

    heads: of a rank, one layer for each; empty: all. presets: layers, of which those of Flash are taken.
    A token sees more entries than a c4a layer selects.
    """
    kinds = {PRESETS[name].kind for name in presets if PRESETS[name].model == "flash"}
    if not kinds:
        raise ArgumentError("--cases", expected="a layer of Flash for whole layers", actual=", ".join(presets))
    ranks = [_FLASH.num_heads // size for size in range(1, _FLASH.o_groups + 1) if _FLASH.o_groups % size == 0]
    for count in heads:
        if count not in ranks:
            raise ArgumentError("--heads", expected=f"heads of a rank's layer, {sorted(ranks)}", actual=count)
    shapes = ((1, 1, 4096), (1, 16, 4096)) if small else ((64, 1, 8192), (1, 2048, 8192))
    layers = [(kind, count) for kind in LayerKind if kind in kinds for count in dict.fromkeys(heads or ranks[:1])]
    return [LayerCase(kind, *shape, count) for kind, count in layers for shape in shapes]


def layer_time(case: LayerCase, plain: Backend, deterministic: Backend | None, clock: Clock, rounds: int) -> LayerTime:
    """Measure a case on both backends in turn, and then the parts of the first."""
    backends = [plain] if deterministic is None else [plain, deterministic]
    with torch.inference_mode():
        calls = [_prepared_layer(case, backend, clock.device).run for backend in backends]
        times = [spread.median for spread in clock.times(calls, rounds)]
        del calls
        parts = _parts(case, plain, clock, rounds)
    exact = times[1] if len(times) > 1 else None
    phase = "decode" if case.tokens == 1 else "prompt"
    return LayerTime(case.layer, case.name, times[0], exact, phase, case.step, tuple(parts), case.completing)


@frozen(eq=False)
class _PreparedLayer:
    """A step of a layer, ready to be run again and again.

    geometry: model of this layer alone.
    layer: the layer.
    metadata: of the step.
    positions: [T] int64.
    hidden: [T, d] hidden states.
    """

    geometry: ModelGeometry
    layer: DeepseekV4Attention
    metadata: Mapping[LayerKey, AttentionMetadata]
    positions: Tensor
    hidden: Tensor

    def run(self) -> None:
        """The layer alone."""
        with set_forward_context(self.metadata):
            self.layer(self.hidden, self.positions)


def _prepared_layer(case: LayerCase, backend: Backend, device: torch.device) -> _PreparedLayer:
    index = next(i for i, (kind, _) in enumerate(_FLASH.layers) if kind is case.kind)
    rank = _FLASH.tensor_parallel(_FLASH.num_heads // case.heads)
    geometry = evolve(rank, layers=(_FLASH.layers[index],))
    longest = case.context + case.tokens
    limits = Limits(case.requests, case.requests * case.tokens, longest)
    layout = KVCacheLayout.fp8_ds_mla()
    manager = CacheManager(geometry, limits, layout, device=device, backend=backend, keep_windows=True)
    tensors = _weights(geometry, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    weights = AttentionWeights.from_dict(tensors, geometry, geometry.layer(0))
    layer = DeepseekV4Attention("layer", geometry, 0, limits, backend, weights, workspace=WorkspaceManager(device))
    layer.bind_kv_cache(manager.caches[0])
    sequences = [manager.new() for _ in range(case.requests)]
    prefixes = list(zip(sequences, case.contexts, strict=True))
    manager.reserve(prefixes)
    manager.advance(prefixes)
    index_keys, normal = manager.caches[0].index, RandomNumbers(device, 1).normal
    if index_keys is not None:
        slots = torch.arange(index_keys.num_blocks * index_keys.block_size, device=device)
        store_index_keys(normal(len(slots), geometry.index_head_dim), index_keys, slots)
    requests = [(sequence, case.tokens) for sequence in sequences]
    metadata, positions = manager.metadata(manager.batch(requests)), manager.positions(requests)
    hidden = normal(positions.shape[0], geometry.hidden_size).to(tensors["wq_a"].dtype)
    return _PreparedLayer(geometry, layer, metadata, positions, hidden)


def _parts(case: LayerCase, backend: Backend, clock: Clock, rounds: int) -> list[LayerPart]:
    """Parts of the layer, with the hyper-connections of attention and those of the next sublayer."""
    device, marks = clock.device, Marks(clock.device)
    prepared = _prepared_layer(case, MarkedBackend(backend, marks), device)
    attention = prepared.layer.attention
    for name, part, then in (
        ("insert_into", "norm + rope + insert", ""),
        ("attend_from", "attention", "output projection"),
    ):
        setattr(attention, name, marks.around(part, getattr(attention, name), then))
    ops = backend.layer_ops
    first, second = (HyperConnections(prepared.geometry, _mixes(prepared.geometry, device), ops) for _ in range(2))
    streams = prepared.hidden[:, None].expand(-1, prepared.geometry.hc_mult, -1).contiguous()

    def run() -> None:
        with set_forward_context(prepared.metadata):
            marks.start("mHC pre")
            post, comb, hidden = first.pre(streams)
            marks.to("projections")
            attended = prepared.layer(hidden, prepared.positions)
            marks.to("mHC post + pre")
            second.after(attended, streams, post, comb)
            marks.to()

    return measured(run, marks, clock, rounds)


def _mixes(geometry: ModelGeometry, device: torch.device) -> HyperConnectionWeights:
    n, size = geometry.hc_mult, geometry.hc_mult * geometry.hidden_size
    count, normal = 2 * n + n * n, RandomNumbers(device, 0).normal
    ones = torch.ones(3, device=device, dtype=torch.float32)
    return HyperConnectionWeights(normal(count, size) * size**-0.5, normal(count), ones)


def _weights(geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> Mapping[str, torch.Tensor]:
    shapes, normal = weight_shapes(geometry, geometry.layer(0)), RandomNumbers(device, 0).normal
    return {
        name: normal(*shape).mul_(shape[-1] ** -0.5).to(dtype if len(shape) == 2 else torch.float32)
        for name, shape in shapes.items()
    }
