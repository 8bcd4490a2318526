"""The three layer types against transformers' DeepSeek-V4, from raw q and kv to the output of the layer.

transformers runs in fp32 with its eager attention. Ours gets the same hidden states, compressed entries and selection,
and does the rest: q-norm, RoPE, paged caches, metadata, attention, inverse RoPE, output projection.

Numbers, all relative to the largest output of the layer:

- fp32 rows: at most 1e-5; measured 5e-7, the same as transformers against itself in chunks (6e-7).
- bf16 rows and fp8_ds_mla, twice. Within the bound that `bounds` derives for the format from the actual queries and
  keys: 0.03 to 0.05 for bf16 and 0.4 to 0.8 for fp8_ds_mla; errors are at most 3e-3 and 5e-2, up to a fifth of it.
  And at most 1e-5, measured 5e-7, from transformers' own attention in float64 over the keys as stored: the format
  costs no more than it must, and nothing but the format costs anything.
- planted bugs: more than 1e-3; measured 0.14 and more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache import key_codecs
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import Batch, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.rope import cos_sin_cache, inverse_frequencies
from dsv4attn.selection import load_backend
from tests.parity import bounds, hf
from tests.parity.hf import deviation
from tests.parity.serving import MODES, Mode, Server

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")

TOLERANCE = 1e-5
PLANTED = 1e-3
SEEDS = 0, 1, 2
MODE = {mode.name: mode for mode in MODES}
NOPE, ROPE = hf.HEAD_DIM - hf.ROPE_DIM, hf.ROPE_DIM
FP32 = KVCacheLayout.rows(NOPE, ROPE, dtype=torch.float32)
ROUNDED = {
    "bf16": KVCacheLayout.rows(NOPE, ROPE),
    "fp8": KVCacheLayout.fp8_ds_mla(NOPE, ROPE, group_size=16),  # the last group is short
    "fp8-fnuz": KVCacheLayout.fp8_ds_mla(NOPE, ROPE, group_size=8, fp8_format=Fp8Format.FNUZ),
}
every_kind = pytest.mark.parametrize("kind", hf.KINDS, ids=[kind.value for kind in hf.KINDS])
every_seed = pytest.mark.parametrize("seed", SEEDS)


def modes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mode", [MODE[name] for name in names], ids=names)


@functools.cache
def geometry() -> ModelGeometry:
    return ModelGeometry.from_config(hf.config())


def traces(seed: int, kind: LayerKind, mode: Mode) -> list[hf.Trace]:
    return [hf.trace(seed, kind, number, sum(chunks)) for number, chunks in enumerate(mode.chunks)]


def served(seen: list[hf.Trace], mode: Mode, layout: KVCacheLayout = FP32, **parts: Any) -> list[Tensor]:
    """Outputs of this package for the sequences of some traces; `parts` replaces what a test wants to break."""
    parts = {"backend": load_backend("reference"), "geometry": geometry(), **parts}
    return Server(seen, mode, layout, **parts).run()


def parity(seen: list[hf.Trace], mode: Mode, **parts: Any) -> float:
    """Largest error of any sequence against transformers."""
    return max(deviation(got, trace.output) for got, trace in zip(served(seen, mode, **parts), seen, strict=True))


# what is compared with


@every_seed
@every_kind
def test_the_traces_exercise_every_feature(seed: int, kind: LayerKind) -> None:
    seen = hf.trace(seed, kind)
    position = torch.arange(hf.LONGEST)
    window = seen.mask[:, : hf.LONGEST] == 0
    entries = (position + 1) // hf.RATIO[kind] * (kind is not LayerKind.SWA)

    assert torch.equal(window.sum(1), (position + 1).clamp(max=hf.WINDOW))
    assert torch.equal(seen.selected.sum(1), entries.clamp(max=3) if kind is LayerKind.CSA else entries)
    assert float((1 - seen.weights.sum(-1)).mean()) > 0.02  # the sink takes part
    assert float(seen.query.std()) > 0.9
    assert deviation(hf.with_keys(seen, seen.keys), seen.output.double()) < TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["chunked", "token"])
@every_seed
def test_transformers_agrees_with_itself_and_with_us_through_its_own_cache(seed: int, mode: str) -> None:
    stepped = hf.run(hf.model(seed), hf.prompt(seed), MODE[mode].chunks[0])

    for kind, seen in zip(hf.KINDS, stepped, strict=True):
        single = hf.trace(seed, kind)
        assert torch.equal(seen.selected, single.selected)
        assert deviation(seen.output, single.output) < TOLERANCE
        assert parity([seen], MODE[mode]) < TOLERANCE


def test_the_rope_tables_are_equal_bit_for_bit() -> None:
    rotary = hf.model(0).rotary_emb
    positions = torch.arange(4096)[None]

    for kind, name in zip(hf.KINDS, ("main", "compress", "compress"), strict=True):
        cos, sin = rotary(torch.zeros(1), positions, layer_type=name)
        rope = geometry().layer_of_kind(kind).rope
        assert torch.equal(cos_sin_cache(rope, 4096), torch.cat([cos[0], sin[0]], -1))


@pytest.mark.parametrize("preset", ["flash", "pro"])
def test_the_geometry_of_a_released_model_is_read_from_its_config(preset: str) -> None:
    want = ModelGeometry.preset(preset)
    config, rotary = hf.released(want)

    got = ModelGeometry.from_config(config, name=want.name)

    assert got == want
    assert torch.equal(inverse_frequencies(got.layer(2).rope), rotary.compress_inv_freq)
    assert torch.equal(inverse_frequencies(got.layer(got.num_layers).rope), rotary.main_inv_freq)


# fp32 rows: nothing is lost


@pytest.mark.pairwise
@every_seed
@modes(*MODE)
@every_kind
def test_fp32_rows_agree(kind: LayerKind, mode: Mode, seed: int) -> None:
    measured = parity(traces(seed, kind, mode), mode)

    print(f"{kind.value} {mode.name} seed {seed}: {measured:.1e}")
    assert measured <= TOLERANCE


@pytest.mark.pairwise
@hf.each_form
@modes("single", "sliced", "mixed", "verify")
@every_kind
def test_fp32_rows_agree_in_every_form(kind: LayerKind, mode: Mode, forms: dict[str, str]) -> None:
    assert parity(traces(3, kind, mode), mode, backend=load_backend("reference", **forms)) <= TOLERANCE


# rounded rows: nothing is lost but what the format rounds


@functools.cache
def judged(seen: hf.Trace, layout: KVCacheLayout) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: the true output, its bound for a layout, and the output over keys stored in that layout."""
    bound = bounds.output_bound(seen, bounds.key_bound(seen.keys, layout))
    return hf.with_keys(seen, seen.keys), bound, hf.with_keys(seen, bounds.stored(seen.keys, layout))


@pytest.mark.pairwise
@every_seed
@modes("single", "mixed", "verify")
@every_kind
@pytest.mark.parametrize("layout", ROUNDED.values(), ids=ROUNDED)
def test_rounded_rows_agree(layout: KVCacheLayout, kind: LayerKind, mode: Mode, seed: int) -> None:
    paged = load_backend("reference", **hf.FORMS[-1]) if mode.name == "mixed" else load_backend("reference")
    seen = traces(seed, kind, mode)

    for trace, got in zip(seen, served(seen, mode, layout, backend=paged), strict=True):
        true, bound, exact = judged(trace, layout)
        off = (got - true).abs()
        share = float((off / bound).max())
        print(f"off {deviation(got, true):.1e}, {share:.2f} of the bound; exact {deviation(got, exact):.1e}")
        assert (off <= bound + TOLERANCE * true.abs().max()).all()
        assert deviation(got, exact) <= TOLERANCE


@every_seed
@every_kind
@pytest.mark.parametrize("layout", ROUNDED.values(), ids=ROUNDED)
def test_the_bound_is_not_an_empty_one(layout: KVCacheLayout, kind: LayerKind, seed: int) -> None:
    seen = hf.trace(seed, kind)
    true, bound, exact = judged(seen, layout)
    moved, may_move = (bounds.stored(seen.keys, layout) - seen.keys).abs(), bounds.key_bound(seen.keys, layout)
    unit = bounds.E4M3 if layout.is_quantised else bounds.BF16

    assert (moved <= may_move).all()
    assert float((moved / may_move).max()) > 0.9  # some key moves as far as the format lets it
    assert bound.max() < 14 * unit * true.abs().max()  # 0.88 of the largest output for fp8, 0.055 for bf16
    assert ((exact - true).abs() <= bound).all()
    assert ((exact - true).abs() > 0.05 * bound).any()
    # typical: a layer's output is about as exact as one element of one key
    assert (exact - true).square().mean().sqrt() < unit * true.square().mean().sqrt()


# planted bugs: every one is seen


class NoSink(ReferenceBackend):
    def decode(self, call: AttentionCall) -> None:
        super().decode(attrs.evolve(call, attn_sink=None))


class LeadingRope(ReferenceBackend):
    def qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        eps: float | None,
    ) -> None:
        turned = q.roll(ROPE, -1)
        kernels.qnorm_rope(turned, positions, cos_sin_cache, eps)
        q.copy_(turned.roll(-ROPE, -1))
        k = kernels.rotated(kv.roll(ROPE, -1), positions, cos_sin_cache).roll(-ROPE, -1)
        kernels.insert(k, cache, slot_mapping)


class ForwardRope(ReferenceBackend):
    def inv_rope_o_proj(self, o: Tensor, positions: Tensor, table: Tensor, wo_a: Any, num_groups: int) -> Tensor:
        return super().inv_rope_o_proj(o, torch.zeros_like(positions), table, wo_a, num_groups)


class LateEntries(MetadataBuilder):
    """Takes pos // r entries for visible, so that a query does not see the entry its own token completes."""

    def build_compressed(
        self, batch: Batch, swa: WindowMetadata, kind: LayerKind, **options: Any
    ) -> CompressedMetadata:
        metadata = super().build_compressed(batch, swa, kind, **options)
        completes = (metadata.slot_mapping[: metadata.num_actual_tokens] >= 0).int()
        metadata.compressed_lens.sub_(completes)
        if metadata.c128a_decode_topk_lens is not None:
            metadata.c128a_decode_topk_lens.sub_(completes[: swa.num_decode_tokens])
        return metadata


COMPRESSED = LayerKind.CSA, LayerKind.HCA
BUGS: dict[str, tuple[tuple[LayerKind, ...], Callable[[], dict[str, Any]]]] = {
    "no sink": (hf.KINDS, lambda: {"backend": NoSink()}),
    "rope on the leading dims": (hf.KINDS, lambda: {"backend": LeadingRope()}),
    "rope of the output not undone": (hf.KINDS, lambda: {"backend": ForwardRope()}),
    "main rope table": (COMPRESSED, lambda: {"geometry": attrs.evolve(geometry(), compress_theta=1e4)}),
    "no yarn": (COMPRESSED, lambda: {"geometry": attrs.evolve(geometry(), compress_yarn=None)}),
    "window one longer": (hf.KINDS, lambda: {"geometry": attrs.evolve(geometry(), window=hf.WINDOW + 1)}),
    "window one shorter": (hf.KINDS, lambda: {"geometry": attrs.evolve(geometry(), window=hf.WINDOW - 1)}),
    "entries one token late": (COMPRESSED, lambda: {"builder": LateEntries}),
}


@pytest.mark.mutation
@modes("single", "token")
@pytest.mark.parametrize(
    ("bug", "kind"),
    [pytest.param(bug, kind, id=f"{bug}-{kind.value}") for bug, (kinds, _) in BUGS.items() for kind in kinds],
)
def test_a_planted_bug_is_seen(bug: str, kind: LayerKind, mode: Mode) -> None:
    _, parts = BUGS[bug]

    measured = parity(traces(0, kind, mode), mode, **parts())

    print(f"{bug}: {measured:.1e}")
    assert measured > PLANTED


@every_kind
def test_a_scale_one_step_too_small_is_seen(kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, layout = hf.trace(0, kind), ROUNDED["fp8"]
    quantize = key_codecs.quantize_keys

    def halved(values: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(values, layout)
        scales[:, : layout.num_groups] -= 1
        return codes, scales

    monkeypatch.setattr(kernels, "quantize_keys", halved)

    (got,) = served([seen], MODE["single"], layout)

    assert deviation(got, judged(seen, layout)[2]) > PLANTED
