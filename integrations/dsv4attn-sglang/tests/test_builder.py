"""A step that SGLang describes and one that our own builder describes name the same keys, on the same caches.

SGLang lists the keys of a window from the newest to the oldest, our builder the other way round. So the bits of a sum
may differ in the last place; with SGLang's rows in our order they are equal.
"""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from attrs import evolve
from kit import case, runner_of
from torch import Tensor

import dsv4attn as ds
from dsv4attn.compat import flash_mla
from dsv4attn.core.cache.layer_caches import LayerCaches

INT = torch.int32
HEADS, CONTEXT, TOPK = 8, 512, 512
KINDS = {0: "swa", 4: "c4a", 128: "c128a"}
LENGTHS = (5, 200, 511)
"""Tokens of each request after the step; each decodes one."""


@pytest.fixture
def aligned(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kit, with requests on pages of their own: request i owns pages 1 + 2 i and 2 + 2 i."""
    monkeypatch.setattr(kit, "_token_loc", lambda i, position, max_context_len: 256 + i * CONTEXT + position)
    return kit


def caches_of(pool: Any, ratio: int) -> LayerCaches:
    """SGLang's caches of a layer, as ours: the same memory."""
    layout = ds.KVCacheLayout.fp8_ds_mla()

    def paged(buffer: Tensor, size: int) -> ds.PagedKVCache:
        return ds.PagedKVCache(buffer.view(torch.uint8)[:, : size * 584].view(-1, size, 584), layout)

    swa = paged(pool.get_swa_key_buffer_radix(0), 256)
    return LayerCaches(swa, paged(pool.get_extra_key_buffer(0), 256 // ratio) if ratio else None)


def fill(cache: ds.PagedKVCache, size: int, counts: Tensor) -> None:
    """Write the first records of each request, and NaN in all others."""
    cache.tensor.fill_(0xFF)
    slots = torch.cat([(1 + 2 * i) * size + torch.arange(n) for i, n in enumerate(counts.tolist())])
    ds.load_backend("reference").quantize_and_insert_k_cache(torch.randn(len(slots), 512).bfloat16(), cache, slots)


def ours(ratio: int, q: Tensor, caches: LayerCaches, sink: Tensor, chosen: Tensor) -> Tensor:
    """The step described by our builder, attended by `forward_mqa`."""
    model = evolve(ds.ModelGeometry.preset("deepseek-v4-flash"), num_heads=HEADS, index_topk=TOPK)
    limits = ds.Limits(max_num_reqs=8, max_num_batched_tokens=8, max_model_len=CONTEXT)
    layer, backend, n = model.layer_of_kind(KINDS[ratio]), ds.load_backend("reference"), len(LENGTHS)
    pages = torch.arange(1, 1 + 2 * n, dtype=INT).view(n, 2)
    lens, starts = torch.tensor(LENGTHS, dtype=INT), torch.arange(n + 1, dtype=INT)
    last = lens.long() - 1
    batch = ds.Batch(
        num_reqs=n,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        slot_mapping=pages[torch.arange(n), last // 256].long() * 256 + last % 256,
        block_table=pages,
        compressed_block_table=pages,
    )
    builder = ds.MetadataBuilder(model, limits, swa_block_size=256)
    metadata, out = builder.build_for(batch, [layer.kind])[layer.kind], torch.empty_like(q)
    arguments = {"layer": layer, "limits": limits, "attn_sink": sink, "topk_indices": chosen if ratio == 4 else None}
    ds.forward_mqa(q, caches, metadata, backend, ds.WorkspaceManager("cpu"), out, **arguments)
    return out


PADDING = 2
"""Rows after the requests of a step, up to the size of a captured graph."""


def pad(batch: Any) -> None:
    """Make the last rows padding, as SGLang does for a graph: request 0, one token, slot 0; positions are stale."""
    for name, value in {"req_pool_indices": 0, "seq_lens": 1, "seq_lens_cpu": 1, "out_cache_loc": 0}.items():
        getattr(batch, name)[-PADDING:] = value
    batch.positions[-PADDING:] = torch.tensor([CONTEXT - 1, CONTEXT // 2 + 77])


@pytest.mark.parametrize("padding", [0, PADDING], ids=["alone", "padded"])
@pytest.mark.parametrize("ratio", KINDS)
def test_decode_attends_to_the_same_keys(
    aligned: Any, monkeypatch: pytest.MonkeyPatch, ratio: int, padding: int
) -> None:
    """With rows of padding too, whose selection is that of an earlier step: outputs of the requests are the same."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    calls: list[dict[str, Any]] = []
    decode = flash_mla.flash_mla_with_kvcache

    @functools.wraps(decode)
    def with_kvcache(**arguments: Any) -> Any:
        calls.append(arguments)
        return decode(**arguments)

    monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", with_kvcache)
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    prefixes, rows = tuple(n - 1 for n in LENGTHS) + (0,) * padding, len(LENGTHS) + padding
    kit_case = case("decode", "DECODE", prefixes, num_heads=HEADS, compress_ratio=ratio)
    runner = runner_of(kit_case, (ratio,), swa_size=16 * 256)
    attention = aligned.ATTENTION_BACKENDS["dsv4"](runner)
    batch = aligned._make_forward_batch(kit_case, runner, max_context_len=CONTEXT, device="cpu")
    if padding:
        pad(batch)
    caches = caches_of(runner.token_to_kv_pool, ratio)
    fill(caches.swa, 256, torch.tensor(LENGTHS))
    visible, size = torch.tensor(LENGTHS) // max(ratio, 1), 256 // max(ratio, 1)
    chosen = torch.full((len(LENGTHS), TOPK), -1, dtype=INT)
    if caches.compressed is not None:
        fill(caches.compressed, size, visible)
    q, sink = torch.randn(rows, HEADS, 512).bfloat16(), torch.randn(HEADS)
    module = aligned.ProjectedDSV4Attention(num_heads=HEADS, hidden_size=512, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=attention)):
        attention.init_forward_metadata(batch)
        if ratio == 4:
            # what the indexer would write: entries of each request in any order, as slots of the pool
            slots = torch.full((rows, TOPK), 2 * size + 1, dtype=INT)
            slots[: len(LENGTHS)] = -1
            for row, n in enumerate(visible.tolist()):
                chosen[row, :n] = torch.randperm(n, dtype=INT)
                slots[row, :n] = (1 + 2 * row) * size + chosen[row, :n]
            core = attention.forward_metadata.core_metadata
            lengths = torch.cat([visible.clamp(min=1).to(INT), torch.ones(padding, dtype=INT)])
            core.set_sparse_topk(4, page_indices=slots, topk_lengths=lengths)
        of_sglang = attention.forward(
            q=q,
            k=q,
            v=q,
            layer=module.attn,
            forward_batch=batch,
            compress_ratio=ratio,
            save_kv_cache=False,
            attn_sink=sink,
        )

    expected, [call] = ours(ratio, q[: len(LENGTHS)], caches, sink, chosen), calls
    assert call["q"].shape[0] == rows
    for row, n in enumerate(call["topk_length"].tolist()):
        call["indices"][row, 0, :n] = call["indices"][row, 0, :n].sort().values
    assert torch.equal(decode(**call)[0][: len(LENGTHS), 0], expected)
    torch.testing.assert_close(of_sglang[: len(LENGTHS)], expected, rtol=2**-7, atol=1e-5)
