"""Prepared steps: checked and planned for the first layer of a kind, run by every layer that differs in addresses.

A prepared step is an entry of `DeepseekSparseSWAMetadata.prepared` and lives as long as these metadata. Its key holds
what may not differ: backend, layer, limits, workspace and compressed metadata by identity, and the signatures of caches
and tensors (`tensorspec.signature`). Addresses, and what tensors hold, may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define, frozen
from torch import Tensor

from dsv4attn.core.caches import LayerCaches

__all__ = ["MOST_STEPS", "Part", "PreparedStep"]

MOST_STEPS = 64
"""Prepared steps of one metadata object: kinds of layers times sizes of padding are far fewer."""


@frozen(eq=False)
class Part:
    """One call of a backend, with all bound but addresses.

    name: in profiles.
    run: `run(q, out, lse, attn_sink, topk_indices, caches)` fills the index buffers of the call, and attends.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, LayerCaches], None]


@define(eq=False)
class PreparedStep:
    """One step of one kind of layers.

    tokens: of the batch; rows of q behind them are padding.
    parts: calls of the backend, in order; None once their views of the workspace were released.
    owners: the objects that the key names by identity.
    """

    tokens: int
    parts: Iterable[Part] | None
    owners: tuple[object, ...]

    def release(self) -> None:
        """Drop the views of a workspace whose memory moved; the next layer prepares the step again."""
        self.parts = None
