"""`PhasedBackend`: a backend made of two, one for decode and one for prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from dsv4attn.core.contract.backend import (
    AttentionCall,
    Backend,
    ChunkCost,
    EntryIndices,
    Phase,
    Products,
    Run,
    check_is_backend,
)
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.model.geometry import LayerGeometry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dsv4attn.core.contract.limits import Limits
    from dsv4attn.core.contract.metadata_extension import MetadataExtension
    from dsv4attn.core.contract.warmup import WarmupSpec
    from dsv4attn.core.model.geometry import ModelGeometry
    from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["PhasedBackend"]


_OF_DECODE = (
    "decode",
    "inv_rope_o_proj",
    "layer_ops",
    "projects_fp8",
    "qnorm_rope_kv_insert",
    "quantize_and_insert_k_cache",
)
_OF_PREFILL = "dequantize_and_gather_k_cache", "prefill", "prepare_rows"
"""The members that the two backends give without change."""


class PhasedBackend(Backend):
    """A backend made of two: each phase runs on its own backend, with the capabilities of that backend.

    Index ops, inserts, output projection and the ops around attention run on the decode backend in both phases: a
    captured decode step contains them, and only the decode backend's `support` covers capture. The prefill backend
    gathers keys and fills the index lists of a gathered chunk (`prepare_rows`), because it reads both. The cache layout
    makes sure that both backends read and write the same bytes.
    """

    def __init__(self, decode: Backend, prefill: Backend) -> None:
        for backend in (decode, prefill):
            check_is_backend(backend)
        self._decode, self._prefill = decode, prefill
        self.name = f"{decode.name}+{prefill.name}"
        of_decode, of_prefill = decode.capabilities, prefill.capabilities
        self.capabilities = evolve(
            of_prefill,
            decode_indices=of_decode.decode_indices,
            max_logits=of_decode.max_logits and of_prefill.max_logits,
            empty_lse=of_decode.empty_lse and of_prefill.empty_lse,
            products=of_prefill.products if of_prefill.products is Products.FP8 else of_decode.products,
        )
        self.index_ops, self.builder_ops = decode.index_ops, decode.builder_ops
        self.rank_ops = decode.rank_ops
        self.deterministic = decode.deterministic and prefill.deterministic
        self.phases_agree = decode is prefill and decode.phases_agree
        for backend, names in ((decode, _OF_DECODE), (prefill, _OF_PREFILL)):
            for name in names:
                setattr(self, name, getattr(backend, name))
        self._both = [decode] if decode is prefill else [decode, prefill]

    def __reduce__(self) -> tuple[type[PhasedBackend], tuple[Backend, Backend]]:
        """Copies and pickles are made from copies of both backends."""
        return type(self), (self._decode, self._prefill)

    def metadata_extension(
        self, geometry: ModelGeometry, limits: Limits, device: torch.device
    ) -> MetadataExtension[Any, Any] | None:
        """The extension of the decode backend."""
        return self._decode.metadata_extension(geometry, limits, device)

    def kernel_variants(self, bounds: WarmupSpec, device: DeviceFacts) -> Iterable[object]:
        """The variants of both backends, each once."""
        return dict.fromkeys(variant for backend in self._both for variant in backend.kernel_variants(bounds, device))

    def warmup(self, bounds: WarmupSpec, device: torch.device) -> int:
        """Warm up both backends, one after the other. Variants that both compile are counted once."""
        counts = [backend.warmup(bounds, device) for backend in self._both]
        facts = DeviceFacts.here(device)
        first, *_, last = (set(backend.kernel_variants(bounds, facts)) for backend in (*self._both, self._prefill))
        # a variant may be compiled more than once, for 32-bit and 64-bit offsets on some devices
        shared = len(first & last) * counts[1] // len(last) if len(counts) > 1 and last else 0
        return sum(counts) - shared

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """The call, prepared by the backend of the phase."""
        return self.of(phase).prepare(phase, call)

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """The call, prepared by the decode backend, or None."""
        return self._decode.prepare_entries(call, entries)

    def of(self, phase: Phase) -> Backend:
        """The backend of a phase."""
        return self._decode if phase is Phase.DECODE else self._prefill

    def prefers_pages(self, layer: LayerGeometry, requests: Sequence[tuple[int, int]], rows: int) -> bool:
        """The answer of the prefill backend."""
        return self._prefill.prefers_pages(layer, requests, rows)

    def takes_raw_q(self, layer: LayerGeometry, q: Tensor, row_dtype: torch.dtype, chunks: Sequence[ChunkCost]) -> bool:
        """Whether both backends do: with raw q the decode backend inserts keys without queries."""
        return all(backend.takes_raw_q(layer, q, row_dtype, chunks) for backend in self._both)

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """The views of the phase's backend."""
        return self.of(phase).scratch(phase, layer, tokens, width)

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """The bound of the phase's backend."""
        return self.of(phase).scratch_bound(phase, layer, max_tokens, max_width)

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """The larger bound of both backends: no two methods run at the same time."""
        return max(backend.transient_bytes(layer, max_tokens, max_width, max_rows) for backend in self._both)
