"""Changed weights are seen by the next call, eager or compiled, or after `refresh`, and never in part.

What a layer has to compute is what a layer computes that is made of the changed weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.layer.decoder_layer import DeepseekV4DecoderLayer, DeepseekV41DecoderLayer
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model import weight_copies
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.core.model.weights import AttentionWeights, HyperConnectionWeights
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.core.layer.weight_changes import (
    AFTER_REFRESH,
    CHANGES,
    SEEN,
    UNSEEN,
    Change,
    changed,
    differ,
    in_place,
    plain,
)
from tests.core.model.scaled import operations
from tests.harness import SMALL, LayerStack, Requests, random_weights
from tests.harness_v41 import SMALL_V41

BF16, FP32, OCP = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TOKENS = 17
C4A = attrs.evolve(SMALL, layers=((LayerKind.CSA, 4),))
C128A = attrs.evolve(SMALL, layers=((LayerKind.HCA, 16),))
# the first two layers of V4.1 that have everything: a compressor with states, an indexer of its own
MODELS = {"c4a": (C4A, 0), "c128a": (C128A, 0), "v41": (SMALL_V41, 1)}
FORMS = ("fp32", "bf16", "fp8", "modules", "fp8 modules")


class Linear(nn.Module):
    """A module with a weight, and its scales if that is fp8."""

    def __init__(self, *, weight: Tensor, scale: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        if scale is not None:
            self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)


def given_of(values: Mapping[str, Tensor], form: str) -> dict[str, Any]:
    """Weights as callers pass them, in memory of their own."""
    weights: dict[str, Any] = {}
    for name, value in values.items():
        is_matrix = value.dim() == 2 and not name.endswith("ape")
        if form == "fp32" or not is_matrix:
            weights[name] = nn.Parameter(value.to(FP32 if form == "fp32" else BF16).clone(), requires_grad=False)
        elif form.startswith("fp8"):
            scale = torch.full((-(-value.shape[0] // 32), -(-value.shape[1] // 32)), 0.011)
            codes = (value / 0.011).clamp(-448, 448).to(OCP)
            weights[name] = Linear(weight=codes, scale=scale) if "modules" in form else BlockScaledWeight(codes, scale)
        else:
            weights[name] = Linear(weight=value.to(BF16)) if form == "modules" else value.to(BF16).clone()
    return weights


def tensors_of(weight: Any) -> list[tuple[Any, str, Tensor]]:
    """(module or None, name, tensor) of a weight."""
    if isinstance(weight, Tensor):
        return [(None, "", weight)]
    if isinstance(weight, BlockScaledWeight):
        return [(None, "", weight.weight), (None, "", weight.scale)]
    return [(weight, name, tensor) for name, tensor in weight.named_parameters()]


class Subject:
    """One layer and its caches, on the reference backend."""

    def __init__(self, model: str, form: str, weights: Mapping[str, Any]) -> None:
        geometry, index = MODELS[model]
        self.geometry, self.index, self.dtype = geometry, index, FP32 if form == "fp32" else BF16
        self.whole = LayerStack.__new__(LayerStack)
        dims = geometry.head_dim - geometry.rope_dim, geometry.rope_dim
        LayerStack.__init__(
            self.whole,
            load_backend("reference"),
            KVCacheLayout.rows(*dims, dtype=self.dtype),
            geometry=geometry,
            limits=Limits(1, 32, 64),
            dtype=self.dtype,
            weights={index: weights},
        )

    @property
    def layer(self) -> DeepseekV4Attention:
        return self.whole.layers[self.index]

    def run(self) -> list[Tensor]:
        """The output of the layer for a prompt and one token, and the bytes of its caches."""
        manager, whole = self.whole.manager, self.whole
        sequence, parts = manager.new(), whole.hidden(3, TOKENS).split([TOKENS - 1, 1])
        try:
            outs = [self._step([(sequence, part.shape[0])], part) for part in parts]
            return [*outs, *(t.clone() for t in whole.bytes_of(sequence))]
        finally:
            manager.free(sequence)

    def _step(self, requests: Requests, hidden: Tensor) -> Tensor:
        """A step of this layer alone."""
        manager = self.whole.manager
        with torch.no_grad(), set_forward_context(manager.metadata(manager.batch(requests))):
            out = self.layer(hidden, manager.positions(requests))
        manager.advance(requests)
        return out


def values_of(model: str) -> dict[str, Tensor]:
    geometry, index = MODELS[model]
    return random_weights(geometry, index)


@pytest.mark.in_turn
@pytest.mark.parametrize("shift", range(len(CHANGES)))
@pytest.mark.parametrize("form", FORMS)
def test_every_change_of_every_weight_is_seen(form: str, shift: int) -> None:
    """One weight after the other, each in one of the ways, and in the end as in a layer that is made anew of them."""
    model = [*MODELS][shift % len(MODELS)]
    weights = given_of(values_of(model), form)
    subject = Subject(model, form, weights)
    expected = subject.run()
    for number, (name, weight) in enumerate(weights.items()):
        change = CHANGES[(number + shift) % len(CHANGES)]
        for module, attribute, tensor in tensors_of(weight):
            change(tensor, changed(tensor), module, attribute)
        actual = subject.run()
        assert differ(actual, expected), f"{name} does not matter"
        expected = actual
    anew = Subject(model, form, {name: plain(weight) for name, weight in weights.items()}).run()
    assert not differ(expected, anew)


class Decoder:
    """A layer between hyper-connections, with everything that has weights. compiler: None: it runs eagerly."""

    def __init__(self, model: str, form: str, weights: Mapping[str, Any], compiler: str | None = None) -> None:
        self.subject = Subject(model, form, {name: weights[name] for name in weights if not name.startswith("hc.")})
        ops, norm = self.subject.layer.backend.layer_ops, weights["hc.norm"]
        mixes = HyperConnectionWeights(*(weights[f"hc.{name}"] for name in ("fn", "base", "scale")))
        connections = [HyperConnections(self.subject.geometry, mixes, ops, norm) for _ in range(2)]
        self.connections, self.is_v41 = connections, model == "v41"
        layer_class = DeepseekV41DecoderLayer if self.is_v41 else DeepseekV4DecoderLayer
        self.layer = layer_class(self.subject.layer, torch.tanh, *connections)
        self.compiled: Callable[..., Any] = self.layer
        if compiler is not None:
            self.compiled = torch.compile(self.layer, backend=compiler, fullgraph=True)

    def replace(self, weights: Mapping[str, Any]) -> None:
        """Give the layer and its hyper-connections other weights."""
        subject, own = self.subject, {name: weights[name] for name in weights if not name.startswith("hc.")}
        subject.layer.refresh(AttentionWeights.from_dict(own, subject.geometry, subject.index))
        mixes = HyperConnectionWeights(*(weights[f"hc.{name}"] for name in ("fn", "base", "scale")))
        for connections in self.connections:
            connections.refresh(mixes, weights["hc.norm"])

    def run(self) -> list[Tensor]:
        """What the layer gives for a prompt."""
        manager, n = self.subject.whole.manager, self.subject.geometry.hc_mult
        streams = self.subject.whole.hidden(3, TOKENS * n).unflatten(0, (TOKENS, n))
        requests = [(manager.new(), TOKENS)]
        pre = torch.ones(TOKENS, n) / n
        try:
            with torch.no_grad(), set_forward_context(manager.metadata(manager.batch(requests))):
                positions = manager.positions(requests)
                arguments = (streams, positions, pre) if self.is_v41 else (streams, positions)
                out = self.compiled(*arguments)
        finally:
            manager.free(requests[0][0])
        return [*out] if self.is_v41 else [out]


def decoder_weights(model: str, form: str) -> dict[str, Any]:
    """Weights of attention, and of hyper-connections, which are bf16 unless all weights are fp32."""
    geometry, g = MODELS[model][0], torch.Generator().manual_seed(2)
    n, d = geometry.hc_mult, geometry.hidden_size
    m = 2 * n + n * n
    shapes = {"fn": (m, n * d), "base": (m,), "scale": (3,), "norm": (d,)}
    dtype = FP32 if form == "fp32" else BF16
    mixes = {f"hc.{name}": nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for name, shape in shapes.items()}
    return {**given_of(values_of(model), form), **{name: mix.requires_grad_(False) for name, mix in mixes.items()}}


@pytest.mark.parametrize(
    ("model", "form", "compiler"),
    [
        ("c4a", "fp32", "aot_eager"),
        ("c4a", "bf16", "aot_eager"),
        ("c4a", "fp8 modules", None),
        ("v41", "bf16", "aot_eager"),
        pytest.param("c4a", "bf16", "inductor", marks=pytest.mark.matrix),
        pytest.param("v41", "fp8 modules", "inductor", marks=pytest.mark.matrix),
        pytest.param("v41", "fp32", "aot_eager", marks=pytest.mark.matrix),
        pytest.param("c128a", "modules", "aot_eager", marks=pytest.mark.matrix),
        pytest.param("c4a", "fp8", "aot_eager", marks=pytest.mark.matrix),
    ],
)
# inductor warns about torch's own use of these when it is imported
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_decoder_layer_has_its_new_weights_after_every_change(model: str, form: str, compiler: str | None) -> None:
    """All weights at once, in one way after another: in the next call, or after `refresh` where the table says so.

    In the end other weights take the place of all, by `refresh`.
    """
    torch._dynamo.reset()
    weights = decoder_weights(model, form)
    decoder = Decoder(model, form, weights, compiler)
    last = decoder.run()
    for seed, change in enumerate([*CHANGES, *UNSEEN, None]):
        if change is None:
            weights = {name: plain(weight) for name, weight in weights.items()}
        for weight in weights.values():
            for module, attribute, tensor in tensors_of(weight):
                (change or in_place)(tensor, changed(tensor, seed), module, attribute)
        if change is None:
            decoder.replace(weights)
        elif change in UNSEEN:
            decoder.layer.refresh()
        actual = decoder.run()
        anew = Decoder(model, form, {name: plain(weight) for name, weight in weights.items()}).run()
        tolerance = 1e-5 if form == "fp32" else 2.0**-7
        for got, expected in zip(actual, anew, strict=True):
            assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance), change
        assert differ(actual, last), change
        last = actual


def test_each_row_of_the_table_in_the_docs_is_one_of_these() -> None:
    page = (Path(__file__).parents[3] / "docs" / "layer.md").read_text(encoding="utf-8")
    rows = [
        row.split("|")[1:3] for row in page.partition("| change of a weight |")[2].split("\n\n")[0].splitlines()[2:]
    ]
    shown = {
        is_seen: [row for row, said in rows if said.strip().startswith("yes") is is_seen] for is_seen in (True, False)
    }
    for is_seen, names in ((True, SEEN), (False, AFTER_REFRESH)):
        for name in names:
            assert any(row.strip().startswith(name) for row in shown[is_seen]), name
    assert len(shown[True]) == len(SEEN)
    # and two rows that have tests of their own: replays, in tests/backends/test_layer_device.py, and other weights
    assert len(shown[False]) == len(AFTER_REFRESH) + 2


def addresses(layer: DeepseekV4Attention) -> list[int]:
    """Of all copies, and of the memory of joined weights."""
    return [made.data_ptr() for made in layer._copies._made.values()]


def copy_addresses(layer: DeepseekV4Attention) -> list[int]:
    """Of all copies whose weights lie elsewhere."""
    own = {value.data_ptr() for _, value in layer._weights.named() if isinstance(value, Tensor)}
    own |= {value.weight.data_ptr() for _, value in layer._weights.named() if not isinstance(value, Tensor)}
    return [address for address in addresses(layer) if address not in own]


@pytest.mark.in_turn
@pytest.mark.parametrize("change", UNSEEN)
@pytest.mark.parametrize("form", FORMS)
def test_refresh_takes_what_no_step_sees_into_the_same_memory(form: str, change: Change) -> None:
    """Weights that are read as they are are right without it, copies are not.

    fp32 weights have no copies: those that are joined lie where they are multiplied.
    """
    weights = given_of(values_of("c4a"), form)
    subject = Subject("c4a", form, weights)
    subject.run()
    known = addresses(subject.layer)
    assert len(known) == {"fp32": 2, "bf16": 6, "fp8": 8, "modules": 6, "fp8 modules": 8}[form]
    for weight in weights.values():
        for module, attribute, tensor in tensors_of(weight):
            change(tensor, changed(tensor), module, attribute)
    anew = Subject("c4a", form, {name: plain(weight) for name, weight in weights.items()}).run()
    assert differ(subject.run(), anew) is (form != "fp32")
    subject.layer.refresh()
    assert not differ(subject.run(), anew)
    assert addresses(subject.layer) == known


def test_torch_counts_no_writes_to_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        weights = {name: value.clone() for name, value in given_of(values_of("c4a"), "bf16").items()}
    subject = Subject("c4a", "bf16", weights)
    subject.run()
    with torch.inference_mode():
        for weight in weights.values():
            weight.copy_(changed(weight))
        anew = Subject("c4a", "bf16", {name: weight.clone() for name, weight in weights.items()}).run()
    assert differ(subject.run(), anew)
    subject.layer.refresh()
    assert not differ(subject.run(), anew)


@pytest.mark.parametrize("form", FORMS)
def test_refresh_takes_other_weights(form: str) -> None:
    weights = given_of(values_of("c4a"), form)
    subject = Subject("c4a", form, weights)
    subject.run()
    known, before = copy_addresses(subject.layer), {name: plain(weight) for name, weight in weights.items()}
    other = {name: plain(weight) for name, weight in weights.items()}
    for weight in other.values():
        for _, _, tensor in tensors_of(weight):
            in_place(tensor, changed(tensor))
    subject.layer.refresh(AttentionWeights.from_dict(other, C4A, 0))
    assert not differ(subject.run(), Subject("c4a", form, other).run())
    assert copy_addresses(subject.layer) == known
    # the weights before keep their values, as their memory is still used
    for name, weight in weights.items():
        pairs = zip(tensors_of(weight), tensors_of(before[name]), strict=True)
        assert all(torch.equal(now, then) for (_, _, now), (_, _, then) in pairs)
    # those are the weights that are watched from now on
    for weight in other.values():
        for _, _, tensor in tensors_of(weight):
            in_place(tensor, changed(tensor, 6))
    assert not differ(subject.run(), Subject("c4a", form, {n: plain(w) for n, w in other.items()}).run())


def test_weights_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    layer_weights = given_of(values_of("c4a"), "bf16")
    subject = Subject("c4a", "bf16", layer_weights)
    expected = subject.run()
    for name, other, said in (
        (
            "wq_a",
            layer_weights["wq_a"].detach().float(),
            r"^weights\.wq_a: expected bfloat16 on cpu.*got float32.*make the layer",
        ),
        ("attn_sink", None, r"^weights\.attn_sink: expected bfloat16 on cpu.*got nothing"),
        ("wkv", layer_weights["wkv"].detach().T.contiguous(), r"^weights\.wkv: expected shape"),
        ("indexer.compressor.ape", layer_weights["indexer.compressor.ape"].to("meta"), "bfloat16 on meta"),
    ):
        weights = AttentionWeights.from_dict(layer_weights, C4A, 0)
        if name.startswith("indexer."):
            assert weights.indexer is not None
            assert weights.indexer.compressor is not None
            inner = attrs.evolve(weights.indexer.compressor, ape=other)
            weights = attrs.evolve(weights, indexer=attrs.evolve(weights.indexer, compressor=inner))
        else:
            fields: dict[str, Any] = {name: other}
            weights = attrs.evolve(weights, **fields)
        with pytest.raises(ArgumentError, match=said):
            subject.layer.refresh(weights)
        assert not differ(subject.run(), expected)


@pytest.mark.parametrize("name", ["wkv", "q_norm", "wo_b", "attn_sink", "indexer.weights_proj", "compressor.ape"])
def test_a_weight_that_was_not_loaded_is_refused_by_its_name(name: str) -> None:
    """Torch multiplies by a meta tensor: the result is memory that was not written."""
    weights = given_of(values_of("c4a"), "fp32")
    weights[name] = weights[name].to("meta")
    said = rf"^weights\.{re.escape(name)}: expected a tensor on cpu, like weights\.wq_a, got one on meta -> load"
    with pytest.raises(ArgumentError, match=said):
        Subject("c4a", "fp32", weights)
    weights[name] = nn.parameter.UninitializedParameter()
    with pytest.raises(ArgumentError, match=rf"^weights\.{re.escape(name)}: expected shape .* got Uninit"):
        Subject("c4a", "fp32", weights)


def test_a_module_whose_weight_becomes_another_dtype_is_refused_in_the_next_step() -> None:
    weights = given_of(values_of("c4a"), "modules")
    subject = Subject("c4a", "modules", weights)
    subject.run()
    weights["indexer.wq_b"].weight = nn.Parameter(weights["indexer.wq_b"].weight.float(), requires_grad=False)
    with pytest.raises(ArgumentError, match=r"^weights\.indexer\.wq_b: expected bfloat16"):
        subject.run()


def test_scales_that_do_not_fit_are_refused_in_the_next_step_and_nothing_changes() -> None:
    weights = given_of(values_of("c4a"), "fp8 modules")
    subject = Subject("c4a", "fp8 modules", weights)
    expected, old = subject.run(), weights["indexer.compressor.wgate"].weight_scale_inv
    # also a weight that would be taken before this one
    in_place(weights["wq_a"].weight, changed(weights["wq_a"].weight))
    weights["indexer.compressor.wgate"].weight_scale_inv = nn.Parameter(torch.ones(9, 9), requires_grad=False)
    copied = [tensor.clone() for tensor in subject.layer._copies._made.values()]
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"^indexer\.compressor\.wgate\.weight_scale_inv: expected"):
            subject.run()
    assert not differ([*subject.layer._copies._made.values()], copied)
    weights["indexer.compressor.wgate"].weight_scale_inv = old
    assert differ(subject.run(), expected)


class FullMemory:
    """Memory of copies is full in one of the places that ask for some, the first time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
        self.left = place
        for owner, name in ((weight_copies.WeightCopies, "_memory"), (weight_copies, "converted")):
            monkeypatch.setattr(owner, name, self.failing(getattr(owner, name)))

    def failing(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError
            return function(*args)

        return run


@pytest.mark.parametrize(
    ("form", "place"), [("bf16", 1), ("bf16", 5), ("bf16", 9), *(("fp8 modules", place) for place in range(0, 16, 3))]
)
def test_after_an_error_while_copies_are_made_the_next_step_makes_all_of_them(
    form: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once of the weights that have changed, and once of the weights that were to be replaced by others."""
    weights = given_of(values_of("c4a"), form)
    subject, other = Subject("c4a", form, weights), {name: plain(weight) for name, weight in weights.items()}
    subject.run()
    for seed, values in ((5, weights), (6, other)):
        for weight in values.values():
            for module, attribute, tensor in tensors_of(weight):
                in_place(tensor, changed(tensor, seed), module, attribute)

    with monkeypatch.context() as patch:
        FullMemory(patch, place)
        with pytest.raises(torch.OutOfMemoryError):
            subject.run()
    expected = Subject("c4a", form, {name: plain(weight) for name, weight in weights.items()}).run()
    assert not differ(subject.run(), expected)
    with monkeypatch.context() as patch:
        FullMemory(patch, place)
        with pytest.raises(torch.OutOfMemoryError):
            subject.layer.refresh(AttentionWeights.from_dict(other, C4A, 0))
    assert not differ(subject.run(), expected)


def test_while_a_graph_is_captured_no_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = given_of(values_of("c4a"), "bf16")
    subject = Subject("c4a", "bf16", weights)
    monkeypatch.setattr(weight_copies, "is_capturing", lambda device: device.type == "cpu")
    subject.run()
    in_place(weights["attn_sink"], changed(weights["attn_sink"]))
    with pytest.raises(ArgumentError, match=r"^weights of layers\.0: expected .* -> call refresh\(\) before"):
        subject.run()
    with pytest.raises(ArgumentError, match=r"call refresh\(\) before the capture"):
        subject.layer.refresh()


@pytest.mark.parametrize("form", FORMS)
def test_a_step_without_changes_computes_nothing(form: str) -> None:
    subject = Subject("c4a", form, given_of(values_of("c4a"), form))
    with operations() as ran:
        subject.layer._see_weights()
    assert not ran


def test_a_copy_of_a_layer_follows_its_own_weights() -> None:
    """Deep copies have weights of their own, and copies of these."""
    layer_weights = given_of(values_of("c4a"), "fp8 modules")
    weights = AttentionWeights.from_dict(layer_weights, C4A, 0)
    parts = [weight_copies.WeightCopies() for _ in range(2)]
    for copies in parts:
        copies.dense("wq_a", weights.wq_a)
        copies.plain("attn_sink", layer_weights["attn_sink"], FP32)
    second = copy.deepcopy(parts[1])
    assert second.changed()
    assert not parts[1].changed()


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_parts_of_ranks_see_what_is_written_to_the_whole(form: str) -> None:
    """Each weight alone: those that are divided, by rows or by columns, and those that are not."""
    layer_weights, part = given_of(values_of("c4a"), form), C4A.tensor_parallel(2)

    def rank_subject(weights: Mapping[str, Any]) -> Subject:
        subject = Subject("c4a", form, weights)
        sharded = AttentionWeights.from_dict(weights, C4A, 0).shard(1, 2)
        limits, backend, workspace = subject.whole.limits, subject.layer.backend, subject.whole.workspace
        layer = DeepseekV4Attention("layers.0", part, 0, limits, backend, sharded, workspace=workspace)
        layer.bind_kv_cache(subject.whole.manager.caches[0])
        subject.whole.layers[0] = layer
        return subject

    subject = rank_subject(layer_weights)
    subject.run()
    for weight in layer_weights.values():
        in_place(weight, changed(weight))
        assert not differ(
            subject.run(), rank_subject({name: plain(weight) for name, weight in layer_weights.items()}).run()
        )


def test_a_namespace_is_watched_like_a_module() -> None:
    weight_cache = weight_copies.WeightCopies()
    codes, scale = torch.ones(4, 4).to(OCP), torch.ones(1, 1)
    module = SimpleNamespace(weight=codes, weight_scale=scale)
    first = weight_cache.dense("wo_a", module)
    assert not weight_cache.changed()
    module.weight_scale = scale * 3
    assert weight_cache.changed()
    assert weight_cache.dense("wo_a", module) is first
    assert torch.equal(first, torch.full((4, 4), 3.0).bfloat16())
    assert not weight_cache.changed()


@pytest.mark.parametrize("form", ["fp8", "fp8 modules"])
def test_a_weight_whose_scales_are_nan_is_named_when_a_layer_takes_it(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = given_of(values_of("c128a"), form)
    tensors_of(weights["wo_b"])[1][2][:, 0] = torch.nan
    rows = tensors_of(weights["wo_b"])[1][2].shape

    subject = Subject("c128a", form, weights)
    subject.layer.refresh()

    text = f"{rows[0]} of {rows.numel()} scales of weights.wo_b are NaN"
    [record] = [record for record in caplog.records if "NaN" in record.getMessage()]
    assert text in record.getMessage()
    assert record.getMessage().startswith(f"layer {subject.layer.prefix}: ")
