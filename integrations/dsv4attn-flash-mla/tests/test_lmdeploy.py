"""LMDeploy 0.18's own attention of DeepSeek-V4: its metadata, kernels (interpreted) and calls of `flash_mla`."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmdeploy_python import loaded
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import Expected, read_row, tolerance

LAYOUT, WINDOW, BLOCK, SCALE = KVCacheLayout.fp8_ds_mla(), 128, 256, 512**-0.5
BUDGET = tolerance(LAYOUT, torch.bfloat16)
HEADS, TOPK = 5, 40
NAMES = {4: "v4_compressed_kv_r4_fp8", 128: "v4_compressed_kv_r128_fp8"}


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def pages(count: int, records: int, dtype: torch.dtype) -> Tensor:
    """Pages [count, records, 584] with a key in every record: codes, RoPE parts, and after all of them the scales."""
    memory = torch.zeros(count, records * 584, dtype=torch.uint8)
    data = memory[:, : records * 576].view(count, records, 576)
    data[..., :448] = torch.randn(count, records, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    data[..., 448:] = random(count, records, 64).view(torch.uint8)
    memory[:, records * 576 :] = torch.randint(124, 130, (count, records * 8))
    return memory.view(count, records, 584).view(dtype)


def key(memory: Tensor, page: int, place: int) -> np.ndarray[Any, Any]:
    """The key in a record, as float64 reads it."""
    raw = memory.view(torch.uint8)[page].flatten().numpy()
    return read_row(raw[place_of(LAYOUT, place, memory.shape[1])], LAYOUT)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """LMDeploy's module. What it allocates is NaN, among that the heads that it adds for FlashMLA; no indexer runs."""
    module, empty = loaded("backends.cuda.attention.v4"), torch.empty

    def poisoned(*sizes: Any, **options: Any) -> Tensor:
        made = empty(*sizes, **options)
        return made.fill_(nan) if made.is_floating_point() and made.element_size() > 1 else made

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(module.CudaV4AttentionMetadata, "_build_index_score_meta", lambda *_: None)
    return module


def metadata(module: Any, lens: list[int], new: list[int], slot: Tensor) -> Any:
    """Of a step: lens, new: tokens of each sequence, and those of this step."""
    kv, q = torch.tensor(lens), torch.tensor(new)
    decoding = max(new) == 1
    tables = torch.randperm(3 * len(lens)).view(len(lens), 3).int()
    step = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, num_gpu_blocks=tables.numel()),
        max_kv_seqlen=max(lens), max_q_seqlen=max(new), sum_kv_seqlen=sum(lens),
    )  # fmt: skip
    cumulative = torch.cat([q.new_zeros(1), q.cumsum(0)]).int()
    given = SimpleNamespace(
        is_decoding=decoding, kv_seqlens=kv.int(), q_seqlens=q.int(), block_offsets=tables,
        cu_seqlens_q=cumulative, cu_seqlens_k=None,
    )  # fmt: skip
    return module.CudaV4AttentionMetadata.from_step_context(given, step, window_size=WINDOW, slot=slot)


@pytest.mark.parametrize(
    ("ratio", "backend", "selected"),
    [(0, "reference", False), (4, "reference", True), (4, "triton", False), (128, "reference", False)],
)
def test_decode_is_what_float64_says_of_its_caches(
    ratio: int, backend: str, selected: bool, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", backend)
    lens, slot = [140, 7, 300, 1], torch.tensor([2, 0, 3, -1])
    meta = metadata(attention, lens, [1] * 4, slot)
    windows, sink = pages(5, WINDOW, torch.float8_e4m3fn), torch.tensor([0.5, -inf, 3.0, 0.0, -2.0])
    caches = {NAMES[ratio]: pages(12, BLOCK // ratio, torch.uint8)} if ratio else {}
    q, kv = random(1, 4, HEADS, 512), random(1, 4, 512)
    chosen = [torch.randperm(max(n // ratio, 1))[:TOPK] if ratio else None for n in lens]
    index = None
    if selected:
        rows = torch.full((4, TOPK), -1, dtype=torch.int32)
        for i, n in enumerate(lens):
            if n >= ratio:
                rows[i, : len(chosen[i])] = chosen[i].int()
        index = SimpleNamespace(
            indices_in_kvcache=rows, topk_length=torch.tensor([min(n // ratio, TOPK) for n in lens]).int()
        )
    layer = attention.TritonV4AttentionImpl(512, SCALE, WINDOW, ratio)
    out = layer.forward(q, kv, sink, meta, windows, caches, slot, index_out=index)

    assert out.shape == (1, 4, HEADS, 512)
    assert not out.isnan().any()
    expected = Expected.empty(3, HEADS, 512)
    for i, n in enumerate(lens[:3]):
        keys = [key(windows, int(slot[i]), position % WINDOW) for position in range(max(n - WINDOW, 0), n)]
        entries = (chosen[i].tolist() if selected else range(n // ratio)) if ratio and n >= ratio else []
        for entry in entries:
            page, place = divmod(entry, BLOCK // ratio)
            keys.append(key(caches[NAMES[ratio]], int(meta.block_offsets[i, page]), place))
        expected.judge(i, q[0, i].double().numpy(), keys, sink.double().numpy(), SCALE)
    assert expected.errors(out[0, :3], None).max() <= BUDGET


@pytest.mark.parametrize(("ratio", "backend"), [(0, "reference"), (4, "triton"), (128, "reference")])
def test_prefill_is_what_float64_says_of_the_chunk_and_its_caches(
    ratio: int, backend: str, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", backend)
    lens, new, slot = [258, 9], [6, 9], torch.tensor([2, 0])
    meta = metadata(attention, lens, new, slot)
    windows, sink = pages(3, WINDOW, torch.float8_e4m3fn), torch.randn(HEADS)
    before = windows.clone()
    caches = {NAMES[ratio]: pages(6, BLOCK // ratio, torch.float8_e4m3fn)} if ratio else {}
    q, kv = random(1, sum(new), HEADS, 512), random(1, sum(new), 512)
    layer = attention.TritonV4AttentionImpl(512, SCALE, WINDOW, ratio)
    index, chosen = None, torch.full((sum(new), 12), -1, dtype=torch.int32)
    if ratio == 4:
        for token, position in enumerate([*range(252, 258), *range(9)]):
            entries = torch.randperm((position + 1) // 4)[:12].int()
            chosen[token, : len(entries)] = entries
        index = SimpleNamespace(indices_in_kvcache=chosen, topk_length=None)
    out = layer.forward(q, kv, sink, meta, windows, caches, slot, index_out=index)

    expected, first = Expected.empty(sum(new), HEADS, 512), 0
    for i, (n, count) in enumerate(zip(lens, new, strict=True)):
        for token in range(first, first + count):
            position = n - count + token - first
            keys = []
            for other in range(max(position - WINDOW + 1, 0), position + 1):
                is_new = other >= n - count
                keys.append(
                    kv[0, first + other - (n - count)].double().numpy()
                    if is_new
                    else key(before, int(slot[i]), other % WINDOW)
                )
            # without an indexer LMDeploy names all entries of a sequence, and `topk_length` hides the later ones
            entries = (
                [e for e in chosen[token].tolist() if e >= 0]
                if ratio == 4
                else range((position + 1) // ratio if ratio else 0)
            )
            for entry in entries:
                page, place = divmod(entry, BLOCK // ratio)
                keys.append(key(caches[NAMES[ratio]], int(meta.block_offsets[i, page]), place))
            expected.judge(token, q[0, token].double().numpy(), keys, sink.double().numpy(), SCALE)
        first += count
    assert expected.errors(out[0], None).max() <= BUDGET


def test_lmdeploy_takes_flash_mla_for_other_models_on_hopper_and_gets_a_refusal_when_it_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # DeepSeek-V2, V3 and Kimi-K2 of LMDeploy attend by FlashMLA wherever it can be imported
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9))
    assert loaded("configurations.utils").flash_mla_available()

    from dsv4attn.errors import UnsupportedError

    plan = loaded("backends.cuda.attention.mla")._build_flash_mla_metadata
    with pytest.raises(UnsupportedError, match=r"dense attention.*uninstall dsv4attn-flash-mla"):
        plan(torch.tensor([5]), 16, 1, False, None)
    plan(torch.tensor([5]), 16, 1, True, 2048)
