"""vLLM's metadata builders of DeepSeek-V4 and V4.1, which add dsv4attn's metadata to what they build.

A builder runs once a step for all layers of its cache group. The conversion copies no tensor: the frozen metadata name
the buffers that vLLM's kernels wrote, so what vLLM updates in place, for drafts and for captured graphs, is seen.

dsv4attn's metadata are made when a layer first asks for them. In a step that replays one captured graph no layer does,
and a builder does little more than vLLM's own: it writes the buffers at fixed addresses, which the graph reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.models.deepseek_v4 import compressor as v4_compressor
from vllm.models.deepseek_v4 import sparse_mla
from vllm.models.deepseek_v41 import compressor as v41_compressor
from vllm.models.deepseek_v41 import sparse_mla as v41_sparse_mla
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, max_decode_query_len
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend

from dsv4attn import CompressedMetadata, LayerKind, WindowMetadata
from dsv4attn.core.contract.backend import RequestRows
from dsv4attn_vllm.guard import RefusedError

if TYPE_CHECKING:
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4SparseMLAMetadataBuilder as _CompressedBuilder
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder as _SWABuilder
else:
    _SWABuilder = _CompressedBuilder = object


class VariableDecodes:
    """Steps of decode alone may be captured, of any number of tokens a request: index rows are per token.

    Steps with prefill may not: their chunks follow from lengths on the host.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:  # noqa: ANN401, ARG003
        """Return the most tokens of a request in a captured step."""
        return max_decode_query_len(vllm_config)


@dataclass
class Described:
    """What metadata of vLLM's are that dsv4attn's are made from. describe: makes them."""

    describe: Callable[[Any], Any] | None = None

    @cached_property
    def dsv4attn(self) -> Any:  # noqa: ANN401 - what `describe` returns
        """The same step for dsv4attn."""
        assert self.describe is not None
        return self.describe(self)


@dataclass
class SWAMetadata(Described, sparse_swa.DeepseekSparseSWAMetadata):
    """vLLM's window metadata.

    max_query_len, max_seq_len: most new tokens, and most tokens, of a request.
    decode_threshold: most new tokens of a decode request, in any step.
    """

    max_query_len: int = 0
    max_seq_len: int = 0
    decode_threshold: int = 1


class Windows(VariableDecodes, _SWABuilder):
    """Builds `SWAMetadata`; goes before vLLM's builder among the bases."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
        **options: Any,  # noqa: ANN401 - replay_start
    ) -> SWAMetadata:
        """Build vLLM's metadata of a step, from which dsv4attn's are made."""
        common = common_attn_metadata
        base = super().build(common_prefix_len, common, fast_build, **options)
        # vLLM's length is an upper bound
        longest = min(common.max_seq_len, self.max_model_len)
        lens = {"max_query_len": common.max_query_len, "max_seq_len": longest}
        return SWAMetadata(**vars(base), **lens, decode_threshold=self.decode_threshold, describe=self._window)

    def _window(self, step: SWAMetadata) -> WindowMetadata:
        return window_of(step, self.window_size)

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
        """Return no plan of FlashMLA for any kind of layer. Some platforms of vLLM leave kinds out."""
        return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"))


class SWAMetadataBuilder(Windows, sparse_swa.DeepseekSparseSWAMetadataBuilder):
    """Builds `SWAMetadata` of V4."""


class V41SWAMetadataBuilder(Windows, v41_sparse_mla.DeepseekV41SparseSWAMetadataBuilder):
    """Builds `SWAMetadata` of V4.1."""


_OF_PREFILL = (
    "prefill_swa_lens",
    "prefill_seq_lens",
    "prefill_gather_lens",
    "prefill_seq_lens_cpu",
    "prefill_query_lens_cpu",
)
"""Fields that vLLM fills in steps with prefill only."""


def window_of(step: SWAMetadata, window: int) -> WindowMetadata:
    """dsv4attn's window metadata of a step."""
    requests, tokens = step.num_decodes + step.num_prefills, step.num_decode_tokens + step.num_prefill_tokens
    rows = step.decode_swa_indices
    prefill_rows = rows.new_empty(0, 1, window) if step.prefill_swa_indices is None else step.prefill_swa_indices
    # what vLLM leaves out in a step without prefill is empty for dsv4attn
    of_prefill: dict[str, Any] = {}
    for name in _OF_PREFILL:
        value, device = getattr(step, name), "cpu" if name.endswith("_cpu") else rows.device
        of_prefill[name] = torch.empty(0, dtype=torch.int32, device=device) if value is None else value
    return WindowMetadata(
        num_decodes=step.num_decodes,
        num_prefills=step.num_prefills,
        num_decode_tokens=step.num_decode_tokens,
        num_prefill_tokens=step.num_prefill_tokens,
        block_size=step.block_size,
        window_size=window,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        block_table=step.block_table[:requests],
        slot_mapping=step.slot_mapping,
        seq_lens=step.seq_lens[:requests],
        query_start_loc=step.query_start_loc[: requests + 1],
        query_start_loc_cpu=step.query_start_loc_cpu[: requests + 1],
        is_valid_token=step.is_valid_token[:tokens],
        token_to_req_indices=step.token_to_req_indices[:tokens],
        decode_swa_indices=rows,
        decode_swa_lens=step.decode_swa_lens,
        prefill_swa_indices=prefill_rows,
        decode_requests=decode_requests(step),
        prefill_requests=prefill_requests(step),
        **of_prefill,
    )


def decode_requests(step: SWAMetadata) -> RequestRows | None:
    """Which decode rows of a step are of one request: vLLM's kernels list keys as `RequestRows` promises."""
    requests, starts = step.token_to_req_indices[: step.num_decode_tokens], step.query_start_loc[: step.num_decodes + 1]
    return RequestRows(requests, starts, step.decode_threshold) if step.decode_threshold > 1 else None


def prefill_requests(step: SWAMetadata) -> RequestRows | None:
    """The same of prefill rows."""
    if not step.num_prefills:
        return None
    first, requests = step.num_decode_tokens, step.num_decodes + step.num_prefills
    rows = step.token_to_req_indices[first : first + step.num_prefill_tokens]
    return RequestRows(rows, step.query_start_loc[: requests + 1], step.max_query_len, step.num_prefills)


@dataclass
class FlashMLAMetadata(Described, sparse_mla.DeepseekV4FlashMLAMetadata):
    """vLLM's compressed metadata. visible_lens: [T] int32 - entries that each token sees."""

    visible_lens: Tensor | None = None


class CompressedBuilder(VariableDecodes, _CompressedBuilder):
    """Builds `metadata_class`; goes before vLLM's builder among the bases."""

    metadata_class: ClassVar[type[Any]] = FlashMLAMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        # [tokens] int32 - entries that each token sees, at an address that captured graphs may read
        self._visible = torch.zeros(tokens, dtype=torch.int32, device=self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> Any:  # noqa: ANN401 - metadata_class
        """Build vLLM's metadata of a step, from which dsv4attn's are made."""
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        visible = self._entries(common_attn_metadata)
        return self.metadata_class(**vars(base), visible_lens=visible, describe=self._compressed)

    def _entries(self, common: CommonAttentionMetadata) -> Tensor:
        """[T] int32 - entries that each token sees."""
        return visible_entries(common, self.compress_ratio, self._visible)

    def _compressed(self, step: Any) -> CompressedMetadata:  # noqa: ANN401 - metadata_class
        """dsv4attn's metadata of a step."""
        kind = LayerKind.HCA if self.compress_ratio == 128 else LayerKind.CSA
        return CompressedMetadata(
            kind=kind,
            compress_ratio=self.compress_ratio,
            num_reqs=step.num_reqs,
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=min(step.max_seq_len, self.model_config.max_model_len),
            block_size=step.block_size,
            topk_tokens=step.topk_tokens if kind is LayerKind.CSA else 0,
            query_start_loc=step.query_start_loc[: step.num_reqs + 1],
            slot_mapping=step.slot_mapping,
            block_table=step.block_table[: step.num_reqs],
            req_id_per_token=step.req_id_per_token[: step.num_actual_tokens],
            compressed_lens=step.visible_lens,
            **self._c128a_rows(step),
        )

    def _c128a_rows(self, base: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's metadata
        """Rows of c128a layers, which V4.1 does not have."""
        return {}


class CompressedMetadataBuilder(CompressedBuilder, sparse_mla.DeepseekV4SparseMLAMetadataBuilder):
    """Builds `FlashMLAMetadata`."""

    def _c128a_rows(self, base: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's metadata
        decode, prefill = base.c128a_global_decode_topk_indices, base.c128a_prefill_topk_indices
        if decode is not None and prefill is not None:
            # of one width; on some devices vLLM's decode rows are as wide as the buffer, and valid up to their lengths
            decode = decode[..., : prefill.shape[1]]
        threshold, shared = self.reorder_batch_threshold or 1, None
        if decode is not None and threshold > 1:
            starts = base.query_start_loc[: base.num_reqs + 1]
            shared = RequestRows(base.req_id_per_token[: decode.shape[0]], starts, threshold)
        return {
            "decode_requests": shared,
            "c128a_global_decode_topk_indices": decode,
            "c128a_decode_topk_lens": base.c128a_decode_topk_lens,
            "c128a_prefill_topk_indices": prefill,
        }


def visible_entries(common: CommonAttentionMetadata, ratio: int, buffer: Tensor) -> Tensor:
    """[T] int32 - entries that each token sees, (position + 1) // ratio, 0 for padding; computed on the device."""
    seen = _seen_tokens(common, buffer)
    return torch.div(seen, ratio, rounding_mode="floor", out=buffer[: len(seen)])


def _seen_tokens(common: CommonAttentionMetadata, buffer: Tensor) -> Tensor:
    """[T] int64 - tokens that each token sees, 0 for padding; computed once for the builders of a cache group.

    They are kept where all these builders find them. A builder, known by its buffer, that asks a second time builds
    another step, for which vLLM has changed the same object.
    """
    slots, tokens, place = common.slot_mapping, common.num_actual_tokens, buffer.data_ptr()
    kept: _Seen | None = vars(common).get(_SEEN)
    # a copy of the object may be of another group, or of other tokens
    if kept is None or place in kept.buffers or kept.slot_mapping is not slots or len(kept.tokens) != tokens:
        kept = _Seen(slots, (positions_of(common) + 1).masked_fill_(slots[:tokens] < 0, 0))
        vars(common)[_SEEN] = kept
    kept.buffers.add(place)
    return kept.tokens


_SEEN = "_dsv4attn_seen"


@dataclass
class _Seen:
    """What `_seen_tokens` keeps. buffers: addresses of those that were filled from it."""

    slot_mapping: Tensor
    tokens: Tensor
    buffers: set[int] = field(default_factory=set)


def positions_of(common: CommonAttentionMetadata) -> Tensor:
    """[T] int64 - positions of the tokens of a step. Raises RefusedError if the model runner passes none."""
    if common.positions is None:
        cure = "use a model runner that passes positions"
        raise RefusedError("CommonAttentionMetadata.positions", expected="a tensor", actual=None, cure=cure)
    return common.positions[: common.num_actual_tokens]


class AnyDevice:
    """What vLLM asks a description of a backend, for any device that dsv4attn has a backend for."""

    builder_class: ClassVar[type[Any]]

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's log."""
        return "DSV4ATTN"

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """Return the builder of metadata."""
        return cls.builder_class

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:  # noqa: ANN401, ARG003 - vLLM's DeviceCapability
        """Whether a device is served: dsv4attn's own selection decides when the layers are built."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether vLLM's batch-invariant mode is served: `invariance` refuses what is not."""
        return True


class Backend(AnyDevice, sparse_mla.DeepseekV4SparseMLABackend):
    """vLLM's description of a DeepSeek-V4 backend."""

    builder_class = CompressedMetadataBuilder


class SWABackend(sparse_swa.DeepseekSparseSWABackend):
    """vLLM's description of the window caches, with dsv4attn's builder.

    All layers have one. Its layouts are those of the index keys' cache: of vLLM's descriptions only that of the index
    keys names layouts, and stages of a pipeline that have no indexer would disagree with the others.
    """

    builder_class: ClassVar[type[Any]] = SWAMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:  # noqa: ANN401 - vLLM's KVCacheLayout
        """Return the orders of a cache's dimensions that layers can read, the preferred one first."""
        return DeepseekV4IndexerBackend.supported_kv_cache_layouts()

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """Return the builder of window metadata."""
        return cls.builder_class

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether vLLM's batch-invariant mode is served, see `AnyDevice`."""
        return True


class StateBackend(v4_compressor.CompressorBackend):
    """vLLM's description of the states of V4's compressors, for its batch-invariant mode."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether the mode is served, see `AnyDevice`."""
        return True


# ---------------------------------------------------------------- DeepSeek-V4.1


@dataclass
class V41FlashMLAMetadata(Described, v41_sparse_mla.DeepseekV4FlashMLAMetadata):
    """vLLM's compressed metadata of V4.1. visible_lens: [T] int32 - entries that each token sees."""

    visible_lens: Tensor | None = None


class V41CompressedMetadataBuilder(CompressedBuilder, v41_sparse_mla.DeepseekV4SparseMLAMetadataBuilder):
    """Builds metadata of the layers that own a compressed cache; those that share the cache read these."""

    metadata_class = V41FlashMLAMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        self._numbers = torch.arange(len(self._visible), dtype=torch.int32, device=self.device)

    def _entries(self, common: CommonAttentionMetadata) -> Tensor:
        return visible_entries_of_replayed(common, self.compress_ratio, self._visible, self._numbers)


def visible_entries_of_replayed(common: CommonAttentionMetadata, ratio: int, buffer: Tensor, numbers: Tensor) -> Tensor:
    """As `visible_entries`, for steps in which tokens are computed again for their windows alone.

    Such a token has a slot of -1 and sees its entries. Padding is what comes after the last request.
    numbers: 0, 1, 2, ...
    """
    seen = (positions_of(common) + 1).masked_fill_(_is_padding(common, numbers), 0)
    return torch.div(seen, ratio, rounding_mode="floor", out=buffer[: len(seen)])


def _is_padding(common: CommonAttentionMetadata, numbers: Tensor) -> Tensor:
    return numbers[: common.num_actual_tokens] >= common.query_start_loc[common.num_reqs]


class V41Backend(AnyDevice, v41_sparse_mla.DeepseekV4SparseMLABackend):
    """vLLM's description of a DeepSeek-V4.1 backend."""

    builder_class = V41CompressedMetadataBuilder


class V41SWABackend(SWABackend):
    """vLLM's description of the window caches, with dsv4attn's builder."""

    builder_class = V41SWAMetadataBuilder


@dataclass
class V41StateMetadata(v41_compressor.CompressorMetadata):
    """vLLM's metadata of the compressor's rings.

    ring_table: [R, 1] int32 - the block of each request's ring, -1 if it has none. requests: [T] int32 - the request of
    each token, -1 for padding.
    """

    ring_table: Tensor | None = None
    requests: Tensor | None = None


class V41StateMetadataBuilder(v41_compressor.CompressorMetadataBuilder):
    """Builds `V41StateMetadata`, in buffers at fixed addresses, which captured graphs read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        scheduler = self.vllm_config.scheduler_config
        tokens = scheduler.max_num_batched_tokens
        self._requests = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        self._places = torch.arange(tokens, dtype=torch.int32, device=self.device)
        # a captured step may be padded with requests
        self._rings = torch.zeros(max(scheduler.max_num_seqs, tokens), 1, dtype=torch.int32, device=self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> V41StateMetadata:
        """Build vLLM's metadata of a step, and what parts on dsv4attn need."""
        common = common_attn_metadata
        base = super().build(common_prefix_len, common, fast_build)
        tokens, reqs = common.num_actual_tokens, common.num_reqs
        requests = base.token_to_req_indices[:tokens].masked_fill(_is_padding(common, self._places), -1)
        table = common.block_table_tensor[:reqs, :1]
        # vLLM gives block 0 to requests that have none
        rings = self._rings[:reqs].copy_(table.masked_fill(table == 0, -1))
        return V41StateMetadata(**vars(base), ring_table=rings, requests=self._requests[:tokens].copy_(requests))


class V41StateBackend(v41_compressor.CompressorBackend):
    """vLLM's description of the rings, with dsv4attn's builder."""

    @staticmethod
    def get_builder_cls() -> type[V41StateMetadataBuilder]:
        """Return the builder."""
        return V41StateMetadataBuilder
