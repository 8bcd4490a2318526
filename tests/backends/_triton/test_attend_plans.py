"""What `attend` keeps of a call is used again for calls that are the same in all it follows from, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import attend
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.contract import AttentionCall
from dsv4attn.core.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.core.keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache

LAYER = LayerGeometry(LayerKind.C4A, 4, 4, 512, Rope(64, 1e4), 16, 8)
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
    "max logits": lambda: (call_of(max_logits=torch.zeros(2, 4)), TUNING, 0),
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


def asked(call: AttentionCall, tuning: Tuning, run: int) -> Any:
    return attend._planned(call, tuning, run, call.scratch[0].shape[1] if call.scratch else 1)[1]


def facts(plan: Any) -> tuple[Any, ...]:
    launches = [(dict(each.constants), each.numbers, each.warps) for each in (plan.attention, plan.reduce)]
    return *launches, plan.blocks, plan.to


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_plans", {})


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_gets_a_plan_of_its_own(name: str) -> None:
    for make in OTHERS.values():
        asked(*make())  # whatever may be mistaken for it
    plain, before = asked(call_of(), TUNING, 0), asked(*OTHERS[name]())
    attend._plans.clear()
    call, tuning, run = OTHERS[name]()
    alone = attend._plan_of(call, tuning, run, call.scratch[0].shape[1] if call.scratch else 1)

    assert facts(before) == facts(alone)
    assert facts(before) != facts(plain)


def test_the_same_call_on_other_memory_and_of_more_tokens_has_the_same_plan() -> None:
    q = torch.zeros(5, 4, 512, dtype=torch.bfloat16)
    keys = [PagedKeys(cache(), dense(tokens=5)), PagedKeys(cache(), dense(4, tokens=5))]

    assert asked(call_of(), TUNING, 0) is asked(call_of(), TUNING, 0)
    assert asked(call_of(), TUNING, 0) is asked(call_of(q=q, out=torch.zeros_like(q), keys=keys), TUNING, 0)


def ints(dtype: torch.dtype) -> DenseIndices:
    return DenseIndices(torch.zeros(2, 8, dtype=dtype), torch.zeros(2, dtype=INT))


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"attn_sink": torch.zeros(4)}),
    ({"attn_sink": torch.zeros(4)}, {"attn_sink": torch.zeros(4).bfloat16()}),
    ({}, {"out": torch.zeros(2, 4, 512)}),
    ({"lse": torch.zeros(2, 4)}, {"lse": torch.zeros(2, 4).double()}),
    ({"max_logits": torch.zeros(2, 4)}, {"max_logits": torch.zeros(2, 4).double()}),
    ({}, {"empty_lse": 0.0}),
    ({}, {"rows": ints(torch.int64)}),
    ({}, {"rows": DenseIndices(ints(INT).indices, torch.zeros(2).long())}),
    ({"scratch": parts(1)}, {"scratch": [part.double() for part in parts(1)]}),
    ({"scratch": parts(1)}, {"scratch": [*parts(1)[:1], *(part.bfloat16() for part in parts(1)[1:])]}),
]


@pytest.mark.parametrize(("usual", "other"), FORMS)
def test_calls_that_launch_other_forms_have_other_plans(usual: dict[str, Any], other: dict[str, Any]) -> None:
    """A plan's launches are not looked at again: dtypes, what is None and the numbers are the plan's."""
    assert asked(call_of(**usual), TUNING, 0) is not asked(call_of(**other), TUNING, 0)
    assert asked(call_of(**other), TUNING, 0) is asked(call_of(**other), TUNING, 0)


def test_plans_that_differ_in_strides_share_what_compiles() -> None:
    one, other = asked(call_of(), TUNING, 0), asked(call_of(first=cache(gap=16)), TUNING, 0)

    assert one is not other
    assert one.attention.constants is other.attention.constants


def test_a_plan_keeps_whatever_it_is_known_by() -> None:
    layout, tuning = KVCacheLayout.fp8_ds_mla(), evolve(TUNING, keys=16)
    plan = asked(call_of(first=cache(layout)), tuning, 0)

    assert {id(tuning), id(layout)} <= {id(one) for one in plan.kept}


def test_plans_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_MOST_PLANS", 3)
    for width in range(1, 9):
        asked(call_of(rows=dense(width)), TUNING, 0)
        assert len(attend._plans) <= 3
