"""A prepared attention call launches, for the tensors of any layer, what a call of its own launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.launching.runtime import Launch
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.core.tensorspec import signature

LAYER = LayerGeometry(LayerKind.CSA, 4, 4, 512, Rope(64, 1e4), 16, 8)
TUNING = Tuning(heads=16, keys=32)
LAYOUT = KVCacheLayout.fp8_ds_mla()
INT = torch.int32
HALF = LAYOUT.page_stride(16) - LAYOUT.page_stride(8)


def cache(
    layout: KVCacheLayout = LAYOUT, blocks: int = 3, size: int = 8, *, gap: int = 0, shift: int = 0
) -> PagedKVCache:
    stride = layout.page_stride(size) + gap
    memory = torch.zeros(blocks * stride + 64, dtype=torch.uint8)
    width = layout.record_bytes
    return PagedKVCache(memory.as_strided((blocks, size, width), (stride, width, 1), shift), layout)


def dense(width: int = 8, stride: int = 8, tokens: int = 2) -> DenseIndices:
    return DenseIndices(torch.zeros(tokens, stride, dtype=INT)[:, :width], torch.zeros(tokens, dtype=INT))


def call_of(**changes: Any) -> AttentionCall:
    """A call over two caches. `first`: instead of the first cache, or of its rows; the rest: of the call."""
    first, rows = changes.pop("first", None) or cache(), changes.pop("rows", None) or dense()
    keys = [PagedKeys(first, rows), PagedKeys(cache(), dense(4))]
    q = torch.zeros(2, 4, 512, dtype=torch.bfloat16)
    return evolve(AttentionCall(LAYER, q, keys, None, torch.zeros_like(q), None, ()), **changes)


def with_gap(gap: int) -> torch.Tensor:
    return torch.zeros(2, 4, 512 + gap, dtype=torch.bfloat16)[..., :512]


def parts(splits: int) -> Sequence[torch.Tensor]:
    return torch.zeros(2, splits, 4, 512), torch.zeros(2, splits, 4), torch.zeros(2, splits, 4)


OTHERS: dict[str, Callable[[], tuple[AttentionCall, Tuning, int]]] = {
    "q strides": lambda: (call_of(q=with_gap(8)), TUNING, 0),
    "out strides": lambda: (call_of(out=with_gap(8)), TUNING, 0),
    "q unaligned": lambda: (call_of(q=with_gap(8)[..., 1:], out=with_gap(7)), TUNING, 0),
    "out elsewhere": lambda: (call_of(out=torch.zeros(4097, dtype=torch.bfloat16)[1:].view(2, 4, 512)), TUNING, 0),
    "q dtype": lambda: (call_of(q=torch.zeros(2, 4, 512), out=torch.zeros(2, 4, 512)), TUNING, 0),
    "heads": lambda: (call_of(q=torch.zeros(2, 8, 512).bfloat16(), out=torch.zeros(2, 8, 512).bfloat16()), TUNING, 0),
    "some heads": lambda: (
        call_of(q=torch.zeros(2, 8, 512).bfloat16()[:, :4], out=torch.zeros(2, 8, 512).bfloat16()[:, :4]),
        TUNING,
        0,
    ),
    "lse": lambda: (call_of(lse=torch.zeros(2, 4)), TUNING, 0),
    "lse strides": lambda: (call_of(lse=torch.zeros(2, 6)[:, :4]), TUNING, 0),
    "max logits": lambda: (call_of(options=AttentionOptions(torch.zeros(2, 4))), TUNING, 0),
    "scale": lambda: (call_of(layer=evolve(LAYER, softmax_scale=0.5)), TUNING, 0),
    "dims": lambda: (call_of(layer=evolve(LAYER, rope=Rope(32, 1e4))), TUNING, 0),
    "tuning": lambda: (call_of(), evolve(TUNING, keys=16), 0),
    "run": lambda: (call_of(scratch=parts(3)), TUNING, 2),
    "parts": lambda: (call_of(scratch=parts(3)), TUNING, 0),
    "one part": lambda: (call_of(scratch=parts(1)), TUNING, 0),
    "page size": lambda: (call_of(first=cache(size=16)), TUNING, 0),
    "page stride": lambda: (call_of(first=cache(gap=16)), TUNING, 0),
    "page size in the same stride": lambda: (call_of(first=cache(size=8, gap=HALF)), TUNING, 0),
    "odd page stride": lambda: (call_of(first=cache(gap=2)), TUNING, 0),
    "cache elsewhere": lambda: (call_of(first=cache(shift=2)), TUNING, 0),
    "blocks": lambda: (call_of(first=cache(blocks=4)), TUNING, 0),
    "layout": lambda: (call_of(first=cache(KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ))), TUNING, 0),
    "order": lambda: (
        call_of(first=cache(KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED))),
        TUNING,
        0,
    ),
    "width": lambda: (call_of(rows=dense(7)), TUNING, 0),
    "row stride": lambda: (call_of(rows=dense(8, 12)), TUNING, 0),
    "one cache": lambda: (call_of(keys=[PagedKeys(cache(), dense())]), TUNING, 0),
    "gathered": lambda: (call_of(keys=GatheredKeys(torch.zeros(9, 512).bfloat16(), dense())), TUNING, 0),
    "more gathered": lambda: (call_of(keys=GatheredKeys(torch.zeros(19, 512).bfloat16(), dense())), TUNING, 0),
    "ragged": lambda: (
        call_of(keys=[PagedKeys(cache(), RaggedIndices(torch.zeros(8, dtype=INT), torch.zeros(3, dtype=INT), 8))]),
        TUNING,
        0,
    ),
    "ragged width": lambda: (
        call_of(keys=[PagedKeys(cache(), RaggedIndices(torch.zeros(8, dtype=INT), torch.zeros(3, dtype=INT), 6))]),
        TUNING,
        0,
    ),
    "capacity": lambda: (
        call_of(keys=[PagedKeys(cache(), RaggedIndices(torch.zeros(9, dtype=INT), torch.zeros(3, dtype=INT), 8))]),
        TUNING,
        0,
    ),
}


BOUND = {
    *("scale", "dims", "tuning", "run", "parts", "one part"),
    *("width", "row stride", "one cache", "gathered", "more gathered", "ragged", "ragged width", "capacity"),
}
"""What a prepared call has bound: the layer, the backend's tuning, scratch, and the rows of the metadata."""


class Recorded(Launch):
    """A launch that is noted, and not run."""

    noted: ClassVar[list[Any]] = []

    def __call__(self, programs: int, pointers: Sequence[Any]) -> None:
        dtypes = [None if pointer is None else pointer.dtype for pointer in pointers]
        self.noted.append((self.kernel, dict(self.constants), self.numbers, self.warps, programs, dtypes))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "Launch", Recorded)


def launches(call: AttentionCall, tuning: Tuning = TUNING, run: int = 0) -> list[Any]:
    """All that a call launches, but for addresses."""
    Recorded.noted.clear()
    attention_launch.attend(call, tuning, tiles_per_split=run)
    return [*Recorded.noted]


def key_of(call: AttentionCall) -> tuple[object, ...]:
    """What core compares of a call before a prepared one serves it."""
    tensors = signature(call.q, call.out, call.attn_sink, call.lse)
    if isinstance(call.keys, GatheredKeys):
        return tensors, None
    return tensors, LayerCaches(*[segment.cache for segment in call.keys]).signature


@pytest.mark.parametrize("name", OTHERS)
def test_calls_that_launch_something_else_differ_in_what_is_bound_or_compared(name: str) -> None:
    call, tuning, run = OTHERS[name]()

    assert launches(call, tuning, run) != launches(call_of())
    assert (key_of(call) != key_of(call_of())) or name in BOUND or call.max_logits is not None


def test_calls_that_are_compared_as_equal_launch_the_same_on_other_memory() -> None:
    first, second = call_of(), call_of()

    assert key_of(first) == key_of(second)
    assert launches(first) == launches(second)


@pytest.mark.parametrize("name", OTHERS)
def test_a_prepared_call_launches_for_other_tensors_what_is_launched_for_them_alone(name: str) -> None:
    call, tuning, run = OTHERS[name]()
    alone = launches(call, tuning, run)
    prepared = attention_launch.prepare(call, tuning, tiles_per_split=run)
    copies = [
        torch.cat([tensor, tensor])[: tensor.shape[0] + 1] if tensor.is_contiguous() else tensor
        for tensor in (call.q, call.out)
    ]
    Recorded.noted.clear()
    prepared(call.tensors._replace(q=copies[0], out=copies[1]))

    assert Recorded.noted == alone


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"attn_sink": torch.zeros(4)}),
    ({"attn_sink": torch.zeros(4)}, {"attn_sink": torch.zeros(4).bfloat16()}),
    ({}, {"out": torch.zeros(2, 4, 512)}),
    ({"lse": torch.zeros(2, 4)}, {"lse": torch.zeros(2, 4).double()}),
]


@pytest.mark.parametrize(("usual", "other"), FORMS)
def test_calls_that_launch_other_forms_are_compared_as_different(usual: dict[str, Any], other: dict[str, Any]) -> None:
    assert key_of(call_of(**usual)) != key_of(call_of(**other))


def test_calls_that_differ_in_strides_share_what_compiles() -> None:
    shape = attention_launch.Shape(
        4, 448, 64, (attention_launch.segment_form(LAYOUT, aligned=True),) * 2, 8, ragged=False, exact=False
    )
    first, second = (attention_launch._launched(shape, TUNING, split=False) for _ in range(2))

    assert first[0] is second[0]
