"""SGLang's indexer of DeepSeek-V4 without DeepGEMM: scores of index keys and selection on dsv4attn.

The plan. What stops SGLang's indexer on a GPU without DeepGEMM, which is every GPU before sm_90, is DeepGEMM alone:
its schedule, which `PagedIndexerMetadata.__post_init__` makes once a step, and its scores, which `forward_c4_indexer`
asks for in every c4a layer. Everything else of indexer and compressor is CUDA C++ that SGLang compiles on the user's
GPU, and nvcc compiles it for sm_80, sm_86 and sm_89 too. So two methods are replaced. SGLang's queries, its index keys,
which its compressor stores, and its metadata stay as they are.

    queries   [T, Hi, 128] fp8, and weights [T, Hi, 1] fp32 with all factors folded, of `_forward_prepare_*`
    keys      pages of 64 records: 64 * 128 codes, then 64 fp32 scales, which are no powers of two
    metadata  for each token: the pages of its request [T, N] int32, and how many entries it sees [T] int32
    out       slots of the compressed cache [T, K] int32, -1 for none; in prefill entry numbers too, in the same columns
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, field
from torch import Tensor

from dsv4attn import Backend, IndexQuery, KVCacheLayout, PagedKVCache, TokenMap
from dsv4attn.core.torch_ops.selection import select_all

PAGE, HEAD_DIM = 64, 128
_LAYOUT = KVCacheLayout.index_fp8(HEAD_DIM)


@define(eq=False)
class _Selection:
    """How the indexers of one pool of caches select: on which backend, over which keys by their layer."""

    backend: Backend
    keys: dict[int, tuple[Tensor, PagedKVCache]] = field(factory=dict)

    def keys_of(self, pool: Any, layer: int) -> PagedKVCache:  # noqa: ANN401 - SGLang's DeepSeekV4TokenToKVPool
        """The index keys of a layer. SGLang's method waits for keys that another server sends."""
        buffer = pool.get_index_k_with_scale_buffer(layer)
        bound = self.keys.get(layer)
        if bound is None or bound[0] is not buffer:
            bound = buffer, PagedKVCache(buffer.view(torch.uint8).view(-1, PAGE, HEAD_DIM + 4), _LAYOUT)
            self.keys[layer] = bound
        return bound[1]


_selections: WeakKeyDictionary[Any, _Selection] = WeakKeyDictionary()


def serve(pool: Any, backend: Backend) -> None:  # noqa: ANN401 - SGLang's DeepSeekV4TokenToKVPool
    """Let the indexers that read a pool of caches select on a backend."""
    _selections[pool] = _Selection(backend)


def plan_selection(metadata: Any) -> None:  # noqa: ANN401 - SGLang's PagedIndexerMetadata
    """Complete the metadata of a step, in place of `PagedIndexerMetadata.__post_init__`.

    No schedule of DeepGEMM and no plan of SGLang's top-k is made. Each token is a request of its own, as it has a row
    of the page table: `dsv4attn_rows` numbers them. `dsv4attn_lens` receives lengths that nothing reads.
    """
    lens = metadata.compressed_seq_lens
    metadata.deep_gemm_metadata, metadata.use_topk_v2 = None, False
    metadata.topk_metadata = torch.empty(0, dtype=torch.int32, device=lens.device)
    metadata.dsv4attn_rows = torch.arange(lens.shape[0], dtype=torch.int32, device=lens.device)
    metadata.dsv4attn_lens = torch.empty_like(metadata.dsv4attn_rows)
    assert (metadata.page_size, metadata.compressed_page_size) == (4 * PAGE, PAGE)


def forward_c4_indexer(
    self: Any,  # noqa: ANN401 - SGLang's DeepseekV4AttnBackend
    x: Tensor,
    q_lora: Tensor,
    c4_indexer: Any,  # noqa: ANN401 - SGLang's C4Indexer
    forward_batch: Any,  # noqa: ANN401 - SGLang's ForwardBatch
    alt_streams: Any = None,  # noqa: ANN401
    enable_multi_stream: bool = False,  # noqa: FBT001, FBT002
    q_lora_ready: Any = None,  # noqa: ANN401 - an event
    skip_compressor: bool = False,  # noqa: FBT001, FBT002
    q_lora_quant: Any = None,  # noqa: ANN401
) -> None:
    """Store the index keys of a step, then select entries for each token, in place of SGLang's method.

    x: [T', hidden]. q_lora: [T', rank]. Rows after the tokens of the metadata are not read.
    """
    if forward_batch.forward_mode.is_idle():
        return
    core, positions = self.forward_metadata.core_metadata, self.forward_metadata.core_metadata.positions
    tokens = min(x.shape[0], q_lora.shape[0], positions.shape[0])
    arguments = {
        "x": x[:tokens],
        "q_lora": q_lora[:tokens],
        "c4_indexer": c4_indexer,
        "positions": positions[:tokens],
        "forward_batch": forward_batch,
    }
    if enable_multi_stream:
        streams = {"alt_streams": alt_streams, "q_lora_ready": q_lora_ready}
        values, weights = self._forward_prepare_multi_stream(**arguments, **streams)
    else:
        quantised = q_lora_quant if q_lora.shape[0] == tokens else None
        values, weights = self._forward_prepare_normal(
            **arguments, skip_compressor=skip_compressor, q_lora_quant=quantised
        )
    if not self.debug_use_external_c4_sparse_indices:
        query = IndexQuery(values, weights.squeeze(2))
        _select(self.token_to_kv_pool, c4_indexer.layer_id, query, core, self.forward_metadata.indexer_metadata)


def _select(pool: Any, layer: int, query: IndexQuery, core: Any, metadata: Any) -> None:  # noqa: ANN401 - as above
    """Write slots, and entry numbers if SGLang has a place for them, of the entries that each token selects."""
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

    capturer, selection = get_global_indexer_capturer(), _selections[pool]
    tokens = min(query.values.shape[0], metadata.compressed_seq_lens.shape[0])
    slots, numbers = core.c4_sparse_page_indices[:tokens], core.c4_sparse_raw_indices
    numbers = torch.empty_like(slots) if numbers is None else numbers[:tokens]
    rows, visible = metadata.dsv4attn_rows[:tokens], metadata.compressed_seq_lens[:tokens]
    # of the page table, which in a captured graph has room for the longest context
    longest = metadata.max_compressed_seq_len
    if longest <= slots.shape[1]:
        select_all(visible, numbers)
    else:
        token_map = TokenMap(metadata.page_table, rows, visible)
        keys = selection.keys_of(pool, layer)
        selection.backend.layer_ops.select_topk(query.tokens(slice(tokens)), keys, token_map, numbers, longest)
    selection.backend.index_ops.compute_global_topk_indices_and_lens(
        numbers, visible, rows, metadata.page_table, PAGE, out=(slots, metadata.dsv4attn_lens[:tokens])
    )
    if capturer is not None:
        capturer.capture(pool.layer_mapping[layer].compress_layer_id, numbers)
