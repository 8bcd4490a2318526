"""`PhasedBackend`: one backend made of two, the first for decode and the second for prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from dsv4attn.core.contract.backend import (
    AttentionCall,
    Backend,
    BackendDefaults,
    ChunkCost,
    CompleteBackend,
    EntryIndices,
    Phase,
    Products,
    Run,
    complete,
)
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.model.geometry import LayerGeometry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dsv4attn.core.contract.index_ops import MetadataExtension
    from dsv4attn.core.contract.limits import Limits
    from dsv4attn.core.contract.warmup import WarmupSpec
    from dsv4attn.core.model.geometry import ModelGeometry
    from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["PhasedBackend"]


class PhasedBackend(BackendDefaults):
    """A `contract.Backend` of two: each phase runs on its own backend, with the capabilities of that backend.

    Index steps, insert, output projection and the steps around attention run on the decode backend in both phases: a
    captured decode step contains them, and only the decode backend's `support` covers capture. Gathering runs on the
    prefill backend, which reads the gathered keys, and with its `prepare_rows` so do the lists of a gathered chunk. The
    cache layout makes sure that both read and write the same bytes.
    """

    def __init__(self, decode: Backend, prefill: Backend) -> None:
        self._decode, self._prefill = complete(decode), complete(prefill)
        self.name = f"{decode.name}+{prefill.name}"
        one, other = prefill.capabilities, decode.capabilities
        self.capabilities = evolve(
            one,
            decode_indices=other.decode_indices,
            max_logits=one.max_logits and other.max_logits,
            empty_lse=one.empty_lse and other.empty_lse,
            products=one.products if one.products is Products.FP8 else other.products,
        )
        self.steps, self.builder_ops = decode.steps, self._decode.builder_ops
        self.rank_steps = self._decode.rank_steps
        self.deterministic = self._decode.deterministic and self._prefill.deterministic
        self.layer_ops, self.projects_fp8 = self._decode.layer_ops, self._decode.projects_fp8
        self.quantize_and_insert_k_cache = decode.quantize_and_insert_k_cache
        self.qnorm_rope_kv_insert = decode.qnorm_rope_kv_insert
        self.inv_rope_o_proj = decode.inv_rope_o_proj
        self.dequantize_and_gather_k_cache = prefill.dequantize_and_gather_k_cache
        self.prepare_rows = self._prefill.prepare_rows
        self.decode, self.prefill = decode.decode, prefill.prefill
        self._both = [self._decode] if decode is prefill else [self._decode, self._prefill]

    def __reduce__(self) -> tuple[type[PhasedBackend], tuple[Backend, Backend]]:
        """Copies and pickles are made of both backends again."""
        return type(self), (self._decode, self._prefill)

    def metadata_extension(
        self, geometry: ModelGeometry, limits: Limits, device: torch.device
    ) -> MetadataExtension[Any, Any] | None:
        """The extension of the decode backend."""
        return self._decode.metadata_extension(geometry, limits, device)

    def kernel_variants(self, bounds: WarmupSpec, device: DeviceFacts) -> Iterable[object]:
        """The variants of both backends, each once."""
        return dict.fromkeys(form for backend in self._both for form in backend.kernel_variants(bounds, device))

    def warmup(self, bounds: WarmupSpec, device: torch.device) -> int:
        """Warm up both, one after the other; variants of both are counted once."""
        counts = [backend.warmup(bounds, device) for backend in self._both]
        facts = DeviceFacts.here(device)
        first, *_, last = (set(backend.kernel_variants(bounds, facts)) for backend in (*self._both, self._prefill))
        # a variant may be compiled more than once, for 32-bit and 64-bit offsets on AMD
        shared = len(first & last) * counts[1] // len(last) if len(counts) > 1 and last else 0
        return sum(counts) - shared

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """Prepared by the phase's backend."""
        return self.of(phase).prepare(phase, call)

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """As the decode backend has it."""
        return self._decode.prepare_entries(call, entries)

    def of(self, phase: Phase) -> CompleteBackend:
        """The backend of a phase."""
        return self._decode if phase is Phase.DECODE else self._prefill

    def prefers_pages(self, layer: LayerGeometry, requests: Sequence[tuple[int, int]], rows: int) -> bool:
        """As the prefill backend has it."""
        return self._prefill.prefers_pages(layer, requests, rows)

    def takes_raw_q(self, layer: LayerGeometry, q: Tensor, row_dtype: torch.dtype, chunks: Sequence[ChunkCost]) -> bool:
        """Whether both do: the decode backend inserts keys without queries then."""
        return all(backend.takes_raw_q(layer, q, row_dtype, chunks) for backend in self._both)

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """The views of the phase's backend."""
        return self.of(phase).scratch(phase, layer, tokens, width)

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """The bound of the phase's backend."""
        return self.of(phase).scratch_bound(phase, layer, max_tokens, max_width)

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """The larger of both: no two methods run at the same time."""
        return max(backend.transient_bytes(layer, max_tokens, max_width, max_rows) for backend in self._both)
