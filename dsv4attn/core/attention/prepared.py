"""Prepared steps: checked and planned for the first layer of a kind, run by every layer that differs in addresses.

A prepared step is an entry of `DeepseekSparseSWAMetadata.prepared` and lives as long as these metadata. Its key is the
identities of backend, layer, limits, workspace and compressed metadata, and the signatures of caches and tensors
(`tensorspec.signature`). Addresses and values of tensors are not part of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define, frozen
from torch import Tensor

from dsv4attn.core.cache.layer_caches import LayerCaches

__all__ = ["MOST_STEPS", "Part", "PreparedStep"]

MOST_STEPS = 64
"""Most prepared steps of one metadata object; kinds of layers x sizes of padding are far fewer."""


@frozen(eq=False)
class Part:
    """One prepared call of a backend: only addresses are arguments.

    name: the call's name in profiles.
    rows: of q and out, those that it computes.
    run: `run(q, out, lse, attn_sink, topk_indices, caches)` fills the index buffers of the call, and attends.
    """

    name: str
    rows: slice
    run: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, LayerCaches], None]


@define(eq=False)
class PreparedStep:
    """One step of one kind of layers.

    tokens: number of tokens of the batch; rows of q behind them are padding.
    parts: calls of the backend, in order; None once their views of the workspace were released.
    owners: the objects whose identities are in the key.
    q_bytes, out_bytes: bytes from the first to behind the last element of q and out.
    """

    tokens: int
    parts: Iterable[Part] | None
    owners: tuple[object, ...]
    q_bytes: int = 0
    out_bytes: int = 0

    def release(self) -> None:
        """Drop the views of a workspace whose memory moved; the next layer prepares the step again."""
        self.parts = None
