"""What is launched around FlashInfer's kernels, against torch; and that a warm-up knows all of it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.sm120.flashinfer import FlashInferAttention
from dsv4attn.backends.sm120.flashinfer_launches import Copies, Results
from dsv4attn.backends.sm120.launch import Sm120Backend
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.sm120.decode_calls import LAYOUT, Trial, installed_flashinfer, layer_of
from tests.backends.sm120.fake_flashinfer import RecordingWrapper

QS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x.clone(),
    "rows apart": lambda x: torch.cat([x, x], 2)[..., :512],
    "rows not at 16 bytes": lambda x: torch.cat([x, x[..., :3]], 2)[..., :512],
    "columns apart": lambda x: torch.stack([x, x], 3)[..., 0],
}


def rows_of(tokens: int, width: int, capacity: int, seed: int) -> torch.Tensor:
    rng = Random(seed)
    ends = (-1, -7, -(2**31), 2**31 - 1, capacity, capacity - 1, 0)
    slots = [[rng.choice((*ends, rng.randrange(capacity))) for _ in range(width)] for _ in range(tokens)]
    return torch.tensor(slots, dtype=torch.int32).view(tokens, width)


def call_of(tokens: int, heads: int, widths: tuple[int, ...], *, sink: bool, form: str = "dense") -> AttentionCall:
    q = torch.randn(tokens, heads, 512, generator=torch.Generator().manual_seed(heads)).bfloat16()
    lens = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    keys = []
    for i, width in enumerate(widths):
        cache = PagedKVCache.allocate(LAYOUT, 3 + i, 4, DEVICE)
        wide = rows_of(tokens, width + 3, cache.capacity, i).to(DEVICE)[:, :width]
        keys.append(PagedKeys(cache, DenseIndices(wide, lens)))
    sinks = torch.linspace(-2, 2, 2 * heads, device=DEVICE)[::2] if sink else None
    out = QS[form](torch.full_like(q, nan)).to(DEVICE)
    return AttentionCall(layer_of(heads), QS[form](q).to(DEVICE), keys, sinks, out, None)


@pytest.mark.parametrize("form", QS)
@pytest.mark.parametrize(("heads", "wide"), [(3, 8), (9, 16), (20, 32), (100, 128), (127, 128)])
def test_copies_of_q_and_sinks_have_heads_of_zeros_without_a_sink(heads: int, wide: int, form: str) -> None:
    for sink in (False, True):
        call = call_of(3, heads, (5,), sink=sink, form=form)
        wide_q = torch.full((3, wide, 512), nan, dtype=torch.bfloat16, device=DEVICE)
        wide_sink = torch.full((wide + 1,), nan, device=DEVICE)
        Copies.of(call, wide, []).launch(call, wide_q, wide_sink[:wide] if sink else None, [])

        assert torch.equal(wide_q[:, :heads], call.q)
        assert not wide_q[:, heads:].any()
        assert wide_sink[wide].isnan()
        if call.attn_sink is not None:
            assert torch.equal(wide_sink[:heads], call.attn_sink)
            assert (wide_sink[heads:wide] == -inf).all()


@pytest.mark.parametrize("copied", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("widths", "target_widths"), [((6, 9), (6, 9)), ((1, 70), (64, 128)), ((1030, 3), (1088, 3))])
def test_copies_of_indices_name_no_slot_that_is_not_there(
    widths: tuple[int, int], target_widths: tuple[int, int], copied: tuple[int, ...]
) -> None:
    call = call_of(3, 8, widths, sink=True)
    to = [torch.full((3, width), 12345, dtype=torch.int32, device=DEVICE) for width in target_widths]
    keys: Any = call.keys
    Copies.of(call, 0, [(i, keys[i], target_widths[i]) for i in copied]).launch(call, None, None, to)

    for i, copy in enumerate(to):
        rows, capacity = keys[i].rows.indices, keys[i].cache.capacity
        right = torch.where(rows < capacity, rows, -1)
        assert torch.equal(copy[:, : widths[i]], right) if i in copied else (copy == 12345).all()
        assert (copy[:, widths[i] :] == (-1 if i in copied else 12345)).all()


def test_of_a_cache_with_more_slots_than_numbers_every_number_is_a_slot() -> None:
    rows = torch.tensor([[2**31 - 1, 2**31 - 2, -1, 0]], dtype=torch.int32, device=DEVICE)
    huge: Any = SimpleNamespace(rows=SimpleNamespace(indices=rows), cache=SimpleNamespace(capacity=2**33))
    call = evolve(call_of(1, 8, (4,), sink=False), keys=[huge])
    to = torch.zeros_like(rows)
    Copies.of(call, 0, [(0, huge, 4)]).launch(call, None, None, [to])

    assert to.tolist() == [[2**31 - 1, 2**31 - 2, -1, 0]]


@pytest.mark.parametrize("form", QS)
@pytest.mark.parametrize(("heads", "wide"), [(3, 8), (20, 32), (127, 128)])
@pytest.mark.parametrize("empty", [-inf, inf, 0.0])
def test_results_are_those_of_the_first_heads(empty: float, heads: int, wide: int, form: str) -> None:
    call = evolve(call_of(3, heads, (5,), sink=False, form=form), options=AttentionOptions(empty_lse=empty))
    wide_out = torch.randn(3, wide, 512).bfloat16().to(DEVICE)
    maxima = torch.randn(3, wide).to(DEVICE)
    maxima[0, 0], maxima[1, 1], maxima[2, 0] = -inf, inf, nan
    memory = torch.full((3, heads + 2), 7.0, device=DEVICE)
    for lse in (None, memory[:, :heads]):
        results = evolve(call, lse=lse, out=call.out.clone(memory_format=torch.preserve_format))
        Results.of(results, wide, lse, out=True, direct=False).launch(maxima, wide_out, results)

        assert torch.equal(results.out, wide_out[:, :heads])
    expected = torch.where(maxima == -inf, empty, maxima)[:, :heads]
    assert torch.equal(memory[:, :heads].nan_to_num(nan=5e5), expected.nan_to_num(nan=5e5))
    assert (memory[:, heads:] == 7).all()


def test_an_lse_that_is_in_its_place_is_changed_only_where_rows_have_no_keys() -> None:
    memory = torch.full((3, 9), 7.0, device=DEVICE)
    memory[1, 2], memory[1, 8] = -inf, -inf
    call = evolve(call_of(3, 8, (5,), sink=False), lse=memory[:, :8], options=AttentionOptions(empty_lse=0.5))
    Results.of(call, 8, call.lse, out=False, direct=True).launch(memory[:, :8], None, call)

    assert memory[1, 2] == 0.5
    assert memory[1, 8] == -inf
    assert memory.eq(7).sum() == 25


class Nothing(RecordingWrapper):
    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch nothing."""


@pytest.mark.parametrize("in_range", [False, True])
def test_a_warm_up_knows_every_launch_around_flashinfer(*, in_range: bool) -> None:
    geometry, limits = ModelGeometry.preset("flash"), Limits(4, 64, 4096)
    # 12 heads are padded above as many tokens as decode kernels take
    for heads, most in ((8, 64), (12, 64), (12, 4)):
        part, seen = evolve(geometry, num_heads=heads, o_groups=1), set()
        bounds = WarmupSpec.of(part, limits, sink=None)
        backend = Sm120Backend(in_range=in_range)
        known = set(backend.kernel_variants(bounds, DeviceFacts.named("sm_120")))
        package = evolve(installed_flashinfer(Nothing), max_decode_tokens=most)
        subject = FlashInferAttention(package, in_range=in_range)
        for sinks in (None, (0.5,)):
            for widths in ((64, 0), (64, 9)):
                for lse, empty in ((False, -inf), (True, -inf), (True, 0.0)):
                    trial = Trial(heads=heads, widths=widths, sinks=sinks, outside=not in_range)
                    # FlashInfer takes slices only where heads are padded, and q and out are copied anyway
                    for form in ("dense", "rows not at 16 bytes") if most == 4 else ("dense",):
                        call = trial.call(lse=lse, empty_lse=empty)
                        with observed() as launched:
                            trial.run(subject, evolve(call, q=QS[form](call.q), out=QS[form](call.out)))
                        seen |= {*launched}
                        assert len(launched) <= 2

        assert seen <= known, {str(form) for form in seen - known}
        assert {form.name for form in seen} == {"settle"} | ({"prepare"} if most == 4 or not in_range else set())


def test_elsewhere_nothing_is_compiled_for_flashinfer() -> None:
    bounds = WarmupSpec.of(ModelGeometry.preset("flash"), Limits(4, 64, 4096))

    def names(arch: str, **options: Any) -> set[str]:
        backend = Sm120Backend(**options)
        return {form.name for form in backend.kernel_variants(bounds, DeviceFacts.named(arch))} & {"prepare", "settle"}

    assert names("sm_120")
    assert names("sm_90") == names("sm_120", kernel="own") == set()
