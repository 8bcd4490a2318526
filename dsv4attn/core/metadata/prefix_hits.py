"""Prefix hits: what a batch says of them, and which tokens of a step must not write what a hit has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.metadata.metadata import Batch, WindowMetadata
from dsv4attn.core.model.layer_geometry import LayerGeometry
from dsv4attn.errors import ArgumentError

__all__ = ["PrefixHits", "check_hits", "hits_of"]


class PrefixHits:
    """Takes the slots of tokens below the end of a prefix hit away, in buffers whose addresses never change.

    builder_ops: index arithmetic of the builder. layers: those whose states may be a ring. buffer: makes a buffer of a
    dtype with an element for each token of the largest step.
    """

    def __init__(
        self, builder_ops: BuilderOps, layers: Iterable[LayerGeometry], buffer: Callable[[torch.dtype], Tensor]
    ) -> None:
        self._build = builder_ops.build_cached_mask
        self._is_cached = buffer(torch.bool)
        self._requests = {
            layer.key: buffer(torch.int32) for layer in layers if layer.shared_latent and layer.has_states
        }

    def hide_entries(self, batch: Batch, swa: WindowMetadata, slots: Tensor) -> None:
        """Set the slots [>= T] of entries that a hit has to -1."""
        self._hide(swa, batch.num_cached_tokens, slots)

    def hide_states(self, batch: Batch, swa: WindowMetadata, slots: Tensor) -> None:
        """Set the slots [>= T] of states that are cached to -1."""
        self._hide(swa, _cached_states(batch), slots)

    def requests_of_ring(self, batch: Batch, swa: WindowMetadata, layer: LayerGeometry) -> Tensor | None:
        """Request [T] int32 of each token whose state is written, or read by an entry that is stored; -1 for others.

        None: of each token, as in the window metadata.
        """
        cached, tokens = _cached_states(batch), swa.num_actual_tokens
        if cached is None:
            return None
        requests = self._requests[layer.key]
        requests[:tokens].copy_(swa.token_to_req_indices)
        requests[tokens:].fill_(-1)
        # an entry on both sides of the end has its states in a page that the request writes, so the page is its own
        return requests[:tokens].masked_fill_(self._mask(swa, cached, layer.compress_ratio), -1)

    def _hide(self, swa: WindowMetadata, num_cached: Tensor | None, slots: Tensor) -> None:
        if num_cached is not None:
            slots[: swa.num_actual_tokens].masked_fill_(self._mask(swa, num_cached, 1), -1)

    def _mask(self, swa: WindowMetadata, num_cached: Tensor, ratio: int) -> Tensor:
        """[T] bool: see `index_ops.build_cached_mask`. The next call overwrites it."""
        mask = self._is_cached[: swa.num_actual_tokens]
        self._build(swa.step_tokens, num_cached, ratio, out=mask)
        return mask


def hits_of(batch: Batch) -> list[tuple[int, int]]:
    """(end of the prefix hit, end of the states that are cached) of each request; it reads tensors."""
    ends = [
        [0] * batch.num_reqs if end is None else end[: batch.num_reqs].tolist()
        for end in (batch.num_cached_tokens, _cached_states(batch))
    ]
    return list(zip(*ends, strict=True))


def check_hits(batch: Batch, layer: LayerGeometry, *, validate: bool) -> None:
    """Check what a batch says of prefix hits, before a layer with entries is served. validate: read tensors too."""
    batch.check_lengths()
    if batch.replay_start is not None and batch.num_cached_tokens is None:
        hint = "entries of replayed tokens are in the caches: give the end of each prefix hit, 0 for none"
        expected = "a tensor where replay_start is given"
        raise ArgumentError("Batch.num_cached_tokens", expected=expected, actual=None, hint=hint)
    if batch.num_cached_states is None or not validate:
        return
    starts = [0] * batch.num_reqs if batch.replay_start is None else batch.replay_start.tolist()
    for i, (end, states) in enumerate(hits_of(batch)):
        if states > end:
            expected = f"at most {end}, the end of the prefix hit (num_cached_tokens)"
            hint = "the states of tokens after the hit are those of this request"
            raise ArgumentError(f"Batch.num_cached_states[{i}]", expected=expected, actual=states, hint=hint)
        first = layer.first_state(end)
        if layer.has_states and states < starts[i] and first < starts[i]:
            expected = f"at most {first}, the first state that entries after token {end} of {layer.kind.value} read"
            hint = "the states of earlier tokens are lost (num_cached_states), so replay from there"
            raise ArgumentError(f"Batch.replay_start[{i}]", expected=expected, actual=starts[i], hint=hint)


def _cached_states(batch: Batch) -> Tensor | None:
    """The end of the states that each request has in its state caches."""
    return batch.num_cached_tokens if batch.num_cached_states is None else batch.num_cached_states
