"""Two backends as one: one decodes, the other prefills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from dsv4attn.core.contract import AttentionCall, Backend, Phase, Products
from dsv4attn.core.device import DeviceFacts
from dsv4attn.core.geometry import LayerGeometry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dsv4attn.core.layout import PagedKVCache
    from dsv4attn.core.warmup_spec import Bounds
    from dsv4attn.core.workspace import BufferSpec

__all__ = ["PhasedBackend"]


class PhasedBackend:
    """A `contract.Backend` made of two; each phase is attended by its own, in the forms that one asks for.

    What both phases share goes to the decode backend: index steps, insert and output projection. A decode step may be
    captured in a graph, and then all of it is: only the decode backend was asked whether it can be. Gathering belongs
    to the prefill backend, in whose form gathered keys are. Both write and read the same bytes, as the layout says.

    `builder_steps` and `metadata_extension` are there if the decode backend brings them; `kernel_variants` and `warmup`
    if at least one backend does, and are those of each that does.
    """

    def __init__(self, decode: Backend, prefill: Backend) -> None:
        """Combine two backends for the same device."""
        self._decode, self._prefill = decode, prefill
        self.name = f"{decode.name}+{prefill.name}"
        one, other = prefill.forms, decode.forms
        self.forms = evolve(
            one,
            decode_indices=other.decode_indices,
            max_logits=one.max_logits and other.max_logits,
            empty_lse=one.empty_lse and other.empty_lse,
            products=one.products if one.products is Products.FP8 else other.products,
        )
        self.steps = decode.steps
        for name in ("builder_steps", "metadata_extension"):
            if hasattr(decode, name):
                setattr(self, name, getattr(decode, name))
        for name, both in (("kernel_variants", self._kernel_variants), ("warmup", self._warmup)):
            if self._that_bring(name):
                setattr(self, name, both)

    def _that_bring(self, name: str) -> list[Any]:
        """The backends with an optional part of the contract; one that serves both phases once."""
        both: Iterable[Any] = (self._decode,) if self._decode is self._prefill else (self._decode, self._prefill)
        return [backend for backend in both if hasattr(backend, name)]

    def _kernel_variants(self, bounds: Bounds, device: DeviceFacts) -> Iterable[object]:
        """See `contract.CompiledBackend`: of both, each form once."""
        brought = self._that_bring("kernel_variants")
        return dict.fromkeys(form for backend in brought for form in backend.kernel_variants(bounds, device))

    def _warmup(self, bounds: Bounds, device: torch.device) -> int:
        """See `contract.CompiledBackend`: both, one after the other. Forms that both compile are counted once."""
        brought = self._that_bring("warmup")
        counts: list[int] = [backend.warmup(bounds, device) for backend in brought]
        if len(counts) < 2 or not all(hasattr(backend, "kernel_variants") for backend in brought):
            return sum(counts)
        facts = DeviceFacts.here(device)
        first, second = (set(backend.kernel_variants(bounds, facts)) for backend in brought)
        # a form may be compiled more than once, near and far on AMD
        return sum(counts) - (len(first & second) * counts[1] // len(second) if second else 0)

    def of(self, phase: Phase) -> Backend:
        """The backend of a phase."""
        return self._decode if phase is Phase.DECODE else self._prefill

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """What the phase's backend asks for."""
        return self.of(phase).scratch(phase, layer, tokens, width)

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """What the phase's backend promises."""
        return self.of(phase).scratch_bound(phase, layer, max_tokens, max_width)

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """The larger of both: no two methods run at the same time."""
        both = (self._decode, self._prefill)
        return max(backend.transient_bytes(layer, max_tokens, max_width, max_rows) for backend in both)

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """By the decode backend."""
        self._decode.quantize_and_insert_k_cache(k, cache, slot_mapping)

    def qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        eps: float,
    ) -> None:
        """By the decode backend."""
        self._decode.qnorm_rope_kv_insert(q, kv, cache, slot_mapping, positions, cos_sin_cache, eps)

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        cache: PagedKVCache,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        offset: int,
    ) -> None:
        """By the prefill backend."""
        self._prefill.dequantize_and_gather_k_cache(out, cache, seq_lens, gather_lens, block_table, offset)

    def decode(self, call: AttentionCall) -> None:
        """By the decode backend."""
        self._decode.decode(call)

    def prefill(self, call: AttentionCall) -> None:
        """By the prefill backend."""
        self._prefill.prefill(call)

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, num_groups: int
    ) -> Tensor:
        """By the decode backend."""
        return self._decode.inv_rope_o_proj(o, positions, cos_sin_cache, wo_a, num_groups)
