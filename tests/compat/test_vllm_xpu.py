"""The field's functions on the xpu backend: float64 answers, and errors before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.backends.xpu import leading_values
from dsv4attn.compat.vllm_xpu import (
    get_padded_num_q_heads,
    triton_bf16_mla_sparse_interface,
    xpu_qnorm_rope_kv_fp8_insert,
    xpu_sparse_decode_fp8,
)
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.attention.attention_trials import OCP, Answer, Trial
from tests.backends._triton.cache.caches import CPU, DEVICE, draw, poisoned, seeded
from tests.backends.xpu.mutants import ATTENDING, planted
from tests.core.attention.strategies import examples

GARBAGE = torch.tensor([-1, -1, -7, -(2**31), 2**31 - 1, 0x7FC00000], dtype=torch.int32)


class Asked(NamedTuple):
    """A call of the interface, on the CPU. Rows of kv that no index names are NaN."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    scale: float
    d_v: int
    lens: Tensor | None
    sink: Tensor | None

    @classmethod
    def draw(
        cls,
        seed: int,
        tokens: int,
        heads: int,
        dims: int,
        d_v: int,
        width: int,
        *,
        dtype: torch.dtype,
        has_options: bool,
    ) -> Asked:
        """Random arguments. more: lengths and sinks, beyond what the original takes."""
        g, rows = seeded(seed), 40
        q = torch.randn(tokens, heads, dims, generator=g).to(dtype)
        kv = torch.randn(rows, 1, dims, generator=g).to(dtype)
        indices = torch.randint(0, rows // 2, (tokens, 1, width), generator=g, dtype=torch.int32) * 2
        hit = torch.rand(indices.shape, generator=g) < 0.3
        garbage = torch.cat([GARBAGE, torch.tensor([rows, rows + 1], dtype=torch.int32)])
        indices[hit] = garbage[torch.randint(0, len(garbage), (int(hit.sum()),), generator=g)]
        kv[1::2] = math.nan
        lens = torch.randint(-3, width + 4, (tokens,), generator=g, dtype=torch.int32)
        sink = torch.randn(heads, generator=g) * 3
        sink[: heads // 4] = math.inf * (-1) ** seed
        return cls(q, kv, indices, dims**-0.5, d_v, lens if has_options else None, sink if has_options else None)

    def run(self, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Call it; the results are on the CPU."""
        q, kv, indices = (tensor.to(DEVICE) for tensor in (self.q, self.kv, self.indices))
        lens, sink = (None if tensor is None else tensor.to(DEVICE) for tensor in (self.lens, self.sink))
        tail = self.q.shape[2] - self.d_v
        results = triton_bf16_mla_sparse_interface(q, kv, indices, self.scale, self.d_v, tail, sink, lens, **options)
        out, max_logits, lse = (tensor.cpu() for tensor in results)
        return out, max_logits, lse

    def error(self, results: tuple[Tensor, Tensor, Tensor]) -> float:
        """Largest error of out, in units of what rounding to its dtype takes, and of the others in 1e-5."""
        worst, (tokens, heads, _), rows = 0.0, self.q.shape, self.kv[:, 0].double().numpy()
        unit = 2.0**-8 if self.q.dtype == torch.bfloat16 else 1e-5
        for t in range(tokens):
            count = self.indices.shape[2] if self.lens is None else max(int(self.lens[t]), 0)
            named = [i for i in self.indices[t, 0, :count].tolist() if 0 <= i < len(rows)]
            keys, sink = rows[named], None if self.sink is None else self.sink.double().numpy()
            q = self.q[t].double().numpy()
            z = self.scale * q @ keys.T
            top = z.max(-1) if named else np.full(heads, -np.inf)
            # the oracle's values are whole keys; their first part is attended in the same way
            out, lse = oracle.attend_row(q, keys, sink, self.scale)
            for mine, right, size in (
                (results[0][t], out[:, : self.d_v], unit * max(float(np.abs(keys).max(initial=1.0)), 1.0)),
                (results[1][t], top, 1e-5),
                (results[2][t], lse, 1e-5),
            ):
                same = np.isneginf(right) & np.isneginf(mine.double().numpy())
                off = np.where(same, 0, mine.double().numpy()) - np.where(same, 0, right)
                worst = max(worst, float(np.nan_to_num(np.abs(off), nan=np.inf).max()) / size)
        return worst


DIMS = st.sampled_from([(32, 32), (40, 32), (31, 31), (33, 20), (2, 1), (1, 1)])


@examples(12)
@given(
    dims=DIMS, seed=st.integers(0, 2**16), tokens=st.integers(0, 3), heads=st.sampled_from([1, 3, 16, 20]),
    width=st.sampled_from([0, 1, 15, 16, 17, 40]), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    has_options=st.booleans(),
)  # fmt: skip
@example(dims=(576, 512), seed=1, tokens=2, heads=20, width=33, dtype=torch.bfloat16, has_options=True)
@example(dims=(576, 512), seed=2, tokens=1, heads=1, width=16, dtype=torch.bfloat16, has_options=False)
@example(dims=(512, 512), seed=3, tokens=2, heads=8, width=17, dtype=torch.bfloat16, has_options=True)
def test_the_interface_gives_the_float64_answer(
    dims: tuple[int, int], seed: int, tokens: int, heads: int, width: int, dtype: torch.dtype, has_options: bool
) -> None:
    call = Asked.draw(seed, tokens, heads, *dims, width, dtype=dtype, has_options=has_options)
    results = call.run()

    assert results[0].shape == (tokens, heads, dims[1])
    assert results[0].dtype == dtype
    assert call.error(results) <= 1


@pytest.mark.parametrize("dims", [(32, 32), (40, 32)])
def test_results_go_to_the_memory_that_is_given(dims: tuple[int, int]) -> None:
    call = Asked.draw(7, 3, 5, *dims, 20, dtype=torch.bfloat16, has_options=True)
    base = torch.full((4, 6, 50), -7.0, dtype=torch.bfloat16, device=DEVICE)
    out, max_logits, lse = base[:3, 1:, 8 : 8 + dims[1]], *torch.full((2, 3, 5), math.nan, device=DEVICE).unbind()
    results = call.run(out=out, max_logits=max_logits, lse=lse)

    assert call.error(results) <= 1
    assert torch.equal(results[0], out.cpu())
    assert torch.equal(results[1], max_logits.cpu())
    assert torch.equal(results[2], lse.cpu())
    out.fill_(-7.0)
    assert bool((base == -7.0).all()), "memory next to out was written"


def test_rows_may_be_any_distance_apart() -> None:
    call = Asked.draw(8, 3, 5, 40, 32, 20, dtype=torch.bfloat16, has_options=True)
    wide = [torch.cat([tensor, torch.full_like(tensor, 1)], -1)[..., : tensor.shape[-1]] for tensor in call[:3]]

    assert call.error(call._replace(q=wide[0], kv=wide[1], indices=wide[2]).run()) <= 1


def test_indices_may_lack_the_middle_dimension() -> None:
    call = Asked.draw(9, 2, 3, 40, 32, 8, dtype=torch.bfloat16, has_options=False)
    q, kv, indices = (tensor.to(DEVICE) for tensor in call[:3])
    flat, deep = (
        triton_bf16_mla_sparse_interface(q, kv, index_form, call.scale, 32, 8)
        for index_form in (indices[:, 0], indices)
    )

    assert all(torch.equal(a, b) for a, b in zip(flat, deep, strict=True))


@pytest.mark.mutation
@pytest.mark.parametrize("bug", [("", ""), *ATTENDING.values()], ids=["none", *ATTENDING])
def test_a_planted_bug_of_the_interface_is_found(
    bug: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [Asked.draw(seed, 3, 3, 300, 260, 40, dtype=torch.float32, has_options=True) for seed in (0, 1)]
    monkeypatch.setattr(leading_values, "kernels", planted(tmp_path, bug))

    assert any(call.error(call.run()) > 1 for call in calls) == (bug != ("", ""))


def test_forms_of_the_interface_are_known_ahead() -> None:
    expected = set(leading_values.variants(3, 32, 40, torch.bfloat16))
    with observed() as seen:
        for with_options in (False, True):
            Asked.draw(9, 2, 3, 40, 32, 8, dtype=torch.bfloat16, has_options=with_options).run()

    assert len(set(seen)) == 2
    assert set(seen) <= expected


# decode


def launched(trial: Trial, *, deep: bool = False, workspace: WorkspaceManager | None = None) -> Answer:
    """A trial's call under the field's name."""
    call, _ = trial.call()
    keys: Any = call.keys
    middle = 1 if deep else 0
    listed = [(k.cache.tensor, k.rows.indices.unsqueeze(1) if middle else k.rows.indices, k.rows.lens) for k in keys]
    (swa, *rest), layout = listed, trial.layouts[0]
    (cache, indices, lens), only = (rest[0], False) if rest else ((None, None, None), True)
    dims = layout.head_dim, layout.nope_dim, layout.rope_dim
    xpu_sparse_decode_fp8(
        call.q, cache, swa[0], only, indices, lens, swa[1], swa[2], call.attn_sink, trial.layer.scale, *dims, call.out,
        workspace=workspace,
    )  # fmt: skip
    return Answer(call.out, None, None)


DECODES = {
    "model": Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(128, 40), tokens=2, heads=8),
    "window": Trial(layouts=(OCP,), pages=(64,), widths=(40,), heads=3),
    "no-columns": Trial(layouts=(OCP, OCP), pages=(64, 64), widths=(20, 0)),
    "no-tokens": Trial(layouts=(OCP, OCP), tokens=0),
    "no-sink": Trial(layouts=(OCP, OCP), widths=(9, 20), sink=False, heads=1, aligned=False),
    "fp32": Trial(layouts=(OCP, OCP), widths=(9, 20), q_dtype=torch.float32),
}


@pytest.mark.parametrize("name", DECODES)
def test_decode_under_the_fields_name_gives_the_oracles_answer(name: str) -> None:
    trial = evolve(DECODES[name], wants_lse=False)

    assert trial.error(launched(trial)) <= 1


def test_decode_takes_indices_with_a_middle_dimension_and_scratch_memory() -> None:
    trial = evolve(DECODES["model"], wants_lse=False)
    workspace = WorkspaceManager(DEVICE, debug=True)
    with observed() as seen:
        assert trial.error(launched(trial, deep=True, workspace=workspace)) <= 1
    workspace.check_canaries()

    assert "reduce" in {variant.name for variant in seen}


def test_a_sink_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_launch.prepare
    monkeypatch.setattr(
        attention_launch,
        "prepare",
        lambda call, *a, **k: (
            lambda tensors: right(evolve(call, attn_sink=None), *a, **k)(tensors._replace(attn_sink=None))
        ),
    )
    trial = evolve(DECODES["model"], wants_lse=False)

    assert trial.error(launched(trial)) > 1


# insert


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tokens", [5, 0])
def test_insert_under_the_fields_name_writes_what_the_reference_writes(tokens: int, flat: bool) -> None:
    layout, g = KVCacheLayout.fp8_ds_mla(24, 8), seeded(3)
    theirs, ours = (poisoned(layout, 4, 3, gap=10, device=device) for device in (CPU, DEVICE))
    q, kv = torch.randn(tokens, 2, 32, generator=g).bfloat16(), torch.randn(tokens, 32, generator=g).bfloat16()
    slots = torch.tensor([7, -1, 11, -5][:tokens], dtype=torch.int64)
    positions = torch.tensor([draw(g, 0, 9) for _ in range(tokens)], dtype=torch.int64)
    table = cos_sin_cache(Trial(layouts=(layout,)).layer.rope, 10)
    expected = q.clone()
    ReferenceBackend().qnorm_rope_kv_insert(expected, kv, theirs, slots, positions, table, 1e-6)
    tensors = [tensor.to(DEVICE) for tensor in (q, kv, slots, positions, table)]
    pages = ours.tensor.as_strided((4, ours.page_stride), (ours.page_stride, 1)) if flat else ours.tensor
    xpu_qnorm_rope_kv_fp8_insert(tensors[0], tensors[1], pages, tensors[2], tensors[3], tensors[4], 1e-6, 3)

    assert torch.equal(ours.tensor.cpu(), theirs.tensor)
    assert torch.equal(tensors[1].cpu(), kv)
    torch.testing.assert_close(tensors[0].cpu(), expected, rtol=2.0**-7, atol=0)


def test_q_needs_no_more_heads_than_it_has() -> None:
    assert [get_padded_num_q_heads(n) for n in (1, 8, 72)] == [1, 8, 72]


# bad input

Q, KV = torch.zeros(2, 3, 40), torch.zeros(9, 1, 40)
INDICES, SINK, LENS = torch.zeros(2, 1, 8, dtype=torch.int32), torch.zeros(3), torch.zeros(2, dtype=torch.int32)
META = "meta"
BAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "q is not a tensor": ({"q": 1}, "q"),
    "q has two dimensions": ({"q": Q[0]}, "q"),
    "q in fp16": ({"q": Q.half()}, "q"),
    "kv of other dims": ({"kv": KV[..., :39]}, "kv"),
    "two heads of kv": ({"kv": KV.expand(9, 2, 40)}, "kv"),
    "kv without its head": ({"kv": KV[:, 0]}, "kv"),
    "indices in int64": ({"indices": INDICES.long()}, "indices"),
    "indices of more tokens": ({"indices": INDICES.expand(2, 2, 8)}, "indices"),
    "indices of fewer tokens": ({"indices": INDICES[:1]}, "indices"),
    "no values": ({"d_v": 0}, "d_v"),
    "more values than dims": ({"d_v": 41}, "d_v"),
    "another tail": ({"block_dpe": 64}, "block_dpe"),
    "V4 without saying so": ({"d_v": 40, "block_dpe": 64}, "block_dpe"),
    "a tail too long": ({"q": torch.zeros(2, 3, 400), "kv": torch.zeros(9, 1, 400)}, "q"),
    "too many values": ({"q": torch.zeros(2, 3, 600), "kv": torch.zeros(9, 1, 600), "d_v": 600}, "d_v"),
    "sinks of other heads": ({"attn_sink": torch.zeros(4)}, "attn_sink"),
    "sinks in bf16": ({"attn_sink": SINK.bfloat16()}, "attn_sink"),
    "lengths of other tokens": ({"topk_length": LENS[:1]}, "topk_length"),
    "lengths in int64": ({"topk_length": LENS.long()}, "topk_length"),
    "lengths with gaps": ({"topk_length": torch.zeros(4, dtype=torch.int32)[::2]}, "topk_length"),
    "out of other dims": ({"out": torch.zeros(2, 3, 40)}, "out"),
    "out of another type": ({"out": torch.zeros(2, 3, 32).bfloat16()}, "out"),
    "out with gaps": ({"out": torch.zeros(2, 3, 64)[..., ::2]}, "out"),
    "lse with gaps": ({"lse": torch.zeros(2, 6)[:, ::2]}, "lse"),
    "largest logits in bf16": ({"max_logits": torch.zeros(2, 3).bfloat16()}, "max_logits"),
    "q with gaps": ({"q": torch.zeros(2, 3, 80)[..., ::2]}, "q"),
    "kv elsewhere": ({"kv": KV.to(META)}, "kv"),
    "indices elsewhere": ({"indices": INDICES.to(META)}, "indices"),
    "sinks elsewhere": ({"attn_sink": SINK.to(META)}, "attn_sink"),
    "lse elsewhere": ({"lse": torch.zeros(2, 3, device=META)}, "lse"),
}


INTERFACE: Mapping[str, Any] = {"q": Q, "kv": KV, "indices": INDICES, "sm_scale": 1.0, "d_v": 32, "block_dpe": 8}
CACHE = PagedKVCache.allocate(KVCacheLayout.fp8_ds_mla(24, 8), 3, 4).tensor
DECODE: Mapping[str, Any] = {
    "q": Q[..., :32],
    "kv_cache": CACHE,
    "swa_kv_cache": CACHE,
    "swa_only": False,
    "topk_indices": INDICES,
    "topk_lens": LENS,
    "swa_indices": INDICES,
    "swa_lens": LENS,
    "attn_sink": SINK,
    "softmax_scale": 1.0,
    "head_dim": 32,
    "nope_head_dim": 24,
    "rope_head_dim": 8,
    "out": torch.zeros(2, 3, 32),
}
BAD_DECODE: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "dims that do not add up": ({"nope_head_dim": 16}, "head_dim"),
    "no compressed cache": ({"kv_cache": None}, "kv_cache"),
    "no selected entries": ({"topk_indices": None}, "topk_indices"),
    "no lengths": ({"topk_lens": None}, "topk_lens"),
    "records of other dims": ({"swa_kv_cache": CACHE[..., :-8]}, "swa_kv_cache"),
    "a cache of floats": ({"kv_cache": CACHE.float()}, "kv_cache"),
    "out of other heads": ({"out": torch.zeros(2, 4, 32)}, "out"),
    "slots of other tokens": ({"swa_indices": INDICES[:1]}, "swa_indices"),
    "lengths in int64": ({"swa_lens": LENS.long()}, "swa_lens"),
    "a cache elsewhere": ({"swa_kv_cache": CACHE.to(META)}, "swa_kv_cache"),
    "out with gaps": ({"out": torch.zeros(2, 3, 64)[..., ::2]}, "out"),
}
INSERT: Mapping[str, Any] = {
    "q": Q[..., :32],
    "kv": torch.zeros(2, 32),
    "swa_kv_cache": CACHE,
    "slot_mapping": torch.zeros(2, dtype=torch.int64),
    "positions": torch.zeros(2, dtype=torch.int64),
    "cos_sin_cache": torch.zeros(5, 8),
    "eps": 1e-6,
    "block_size": 4,
}
BAD_INSERT: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "kv of other tokens": ({"kv": torch.zeros(3, 32)}, "kv"),
    "pages of another size": ({"block_size": 5}, "cache tensor"),
    "slots in int32": ({"slot_mapping": LENS}, "slot_mapping"),
    "positions in int32": ({"positions": LENS}, "positions"),
    "angles for all dims": ({"cos_sin_cache": torch.zeros(5, 32)}, "cos_sin_cache"),
    "kv with gaps": ({"kv": torch.zeros(2, 64)[:, ::2]}, "kv"),
}


REFUSED: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any], str]] = {
    f"{function.__name__}: {name}": (function, {**good, **changed}, argument)
    for function, good, bad in (
        (triton_bf16_mla_sparse_interface, INTERFACE, BAD),
        (xpu_sparse_decode_fp8, DECODE, BAD_DECODE),
        (xpu_qnorm_rope_kv_fp8_insert, INSERT, BAD_INSERT),
    )
    for name, (changed, argument) in bad.items()
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_an_error_before_any_launch(name: str) -> None:
    function, arguments, argument = REFUSED[name]
    with observed() as seen, pytest.raises(ArgumentError, match=f"^{argument}: expected"):
        function(**arguments)

    assert not seen
