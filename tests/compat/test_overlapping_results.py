"""Every function under another library's name refuses results in memory that it reads, before any launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.compat import flash_mla, vllm_rocm, vllm_rocm_ragged, vllm_xpu
from dsv4attn.compat.flashinfer_sm120 import SparseMLASm120Wrapper
from dsv4attn.errors import ArgumentError

TOKENS, HEADS, COLUMNS, BYTES = 3, 2, 4, 2**16
INT, F32, BF16 = torch.int32, torch.float32, torch.bfloat16
DIMS = {"head_dim": 512, "nope_head_dim": 448, "rope_head_dim": 64}


def memory(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Zeros at the begin of a storage in which every other argument has room."""
    return torch.zeros(BYTES, dtype=torch.uint8).view(dtype).as_strided(shape, torch.empty(shape).stride())


def over(read: Tensor, result: Tensor) -> Tensor:
    """Memory like a result, at the address of a tensor that is read."""
    whole = torch.empty(0, dtype=torch.uint8).set_(read.untyped_storage())
    return whole.view(result.dtype).as_strided(result.shape, result.stride())


def rows(prefix: str, lens: str = "lens") -> dict[str, Tensor]:
    return {f"{prefix}indices": memory(TOKENS, COLUMNS, dtype=INT), f"{prefix}{lens}": memory(TOKENS, dtype=INT)}


def records(*shape: int) -> Tensor:
    return memory(2, 4, *shape, dtype=torch.uint8)


def heads(dim: int = 512) -> Tensor:
    return memory(TOKENS, HEADS, dim)


def sink() -> Tensor:
    return memory(HEADS, dtype=F32)


def with_kvcache() -> Any:
    shape = (TOKENS, 1, COLUMNS)
    read = {"q": memory(TOKENS, 1, HEADS, 512), "k_cache": records(1, 584), "indices": memory(*shape, dtype=INT)}
    read |= {"extra_k_cache": records(1, 584), "extra_indices_in_kvcache": memory(*shape, dtype=INT)}
    read |= {"topk_length": memory(TOKENS, dtype=INT), "extra_topk_length": memory(TOKENS, dtype=INT)}
    given: dict[str, Any] = {"block_table": None, "cache_seqlens": None, "head_dim_v": 512}
    given["tile_scheduler_metadata"] = flash_mla.get_mla_metadata()[0]
    return flash_mla.flash_mla_with_kvcache, {**read, "attn_sink": sink()}, {"out": read["q"]}, given


def sparse_fwd() -> Any:
    read = {"q": heads(), "kv": memory(8, 1, 512), "indices": memory(TOKENS, 1, COLUMNS, dtype=INT)}
    read |= {"topk_length": memory(TOKENS, dtype=INT), "attn_sink": sink()}
    return flash_mla.flash_mla_sparse_fwd, read, {"out": read["q"]}, {"sm_scale": 1.0}


def xpu_interface() -> Any:
    read = {"q": heads(), "kv": memory(8, 1, 512), **rows("", "unused"), "attn_sink": sink()}
    read["topk_length"] = read.pop("unused")
    results = {"out": read["q"], **{name: memory(TOKENS, HEADS, dtype=F32) for name in ("max_logits", "lse")}}
    return vllm_xpu.triton_bf16_mla_sparse_interface, read, results, {"sm_scale": 1.0, "block_dpe": 0}


def xpu_decode() -> Any:
    read = {"q": heads(), "kv_cache": records(584), "swa_kv_cache": records(584), **rows("topk_"), **rows("swa_")}
    given = {"swa_only": False, "softmax_scale": 1.0, **DIMS}
    return vllm_xpu.xpu_sparse_decode_fp8, {**read, "attn_sink": sink()}, {"out": read["q"]}, given


def xpu_insert() -> Any:
    integers = {name: memory(TOKENS, dtype=torch.int64) for name in ("slot_mapping", "positions")}
    read = {"kv": memory(TOKENS, 512), **integers, "cos_sin_cache": memory(8, 64, dtype=F32)}
    results = {"q": heads(), "swa_kv_cache": records(584)}
    return vllm_xpu.xpu_qnorm_rope_kv_fp8_insert, read, results, {"eps": 1e-6, "block_size": 4}


def rocm_decode() -> Any:
    read = {"q": heads(), "kv_cache": records(584), "swa_k_cache": records(584), **rows("topk_"), "attn_sink": sink()}
    read["swa_ragged_indices"] = memory(TOKENS * COLUMNS, dtype=INT)
    read["swa_ragged_indptr"] = memory(TOKENS + 1, dtype=INT)
    read |= {"positions": memory(TOKENS, dtype=torch.int64), "cos_sin_cache": memory(8, 64, dtype=F32)}
    given = {"swa_only": False, "scale": 1.0, "swa_indices": None, "swa_lens": None, **DIMS}
    given |= {"topk_ragged_indices": None, "topk_ragged_indptr": None}
    return vllm_rocm.rocm_sparse_attn_decode, read, {"output": read["q"]}, given


def rocm_prefill() -> Any:
    read = {"q": heads(), "kv": memory(8, 1, 512), **rows("", "topk_length"), "attn_sink": sink()}
    return vllm_rocm.rocm_sparse_attn_prefill, read, {"output": read["q"]}, {"scale": 1.0, **DIMS}


def flashinfer() -> Any:
    read = {"q": heads(), "kv_cache": records(584), **rows("", "topk_length"), "attn_sink": sink()}
    read |= {"extra_kv_cache": records(584), **rows("extra_", "topk_length")}
    results = {"output": read["q"], "out_lse": memory(TOKENS, HEADS, dtype=F32)}
    results |= {"mid_out": memory(2048), "mid_lse": memory(64, dtype=F32)}
    return SparseMLASm120Wrapper().run, read, results, {"sm_scale": 1.0}


def graph_buffers() -> Any:
    read = {"ragged_indices": memory(TOKENS * COLUMNS, dtype=INT), "ragged_indptr": memory(TOKENS + 1, dtype=INT)}
    results = {"indices_buffer": memory(64, dtype=INT), "indptr_buffer": memory(64, dtype=INT)}
    return vllm_rocm_ragged.copy_ragged_to_graph_buffers, read, results, {"num_rows": TOKENS, "max_entries_per_row": 4}


DOORS: Mapping[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        with_kvcache, sparse_fwd, xpu_interface, xpu_decode, xpu_insert, rocm_decode, rocm_prefill, flashinfer,
        graph_buffers,
    )
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_a_result_in_memory_that_is_read_is_refused_by_the_names_of_both(door: str) -> None:
    function, read, results, given = DOORS[door]()
    own = {name: memory(*result.shape, dtype=result.dtype) for name, result in results.items()}
    for result, of_result in own.items():
        earlier = {name: tensor for name, tensor in own.items() if [*own].index(name) < [*own].index(result)}
        for name, tensor in {**read, **earlier}.items():
            changed = {**own, result: over(tensor, of_result)}
            with pytest.raises(ArgumentError, match=f"^{result}: expected memory apart from that of {name}, got"):
                function(**read, **changed, **given)
    # a result that begins one token after what is read
    if "q" in read:
        name, (out, *_) = next(iter(results)), results.values()
        later = over(read["q"], out).as_strided(out.shape, out.stride(), out.stride(0))
        with pytest.raises(
            ArgumentError, match=f"^{name}: expected memory apart from that of q, got a tensor that over"
        ):
            function(**read, **{**own, name: later}, **given)
    assert not any(tensor.any() for tensor in (*read.values(), *own.values()))
