"""`Exchange`: what attention asks of the ranks that share the compressed entries of a layer; `ONE_RANK` is one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.forward_mqa import attend
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry

__all__ = ["ONE_RANK", "Exchange"]


class Exchange:
    """One rank, which holds all entries: it sends nothing, and no other rank has to agree.

    `context_parallel.context.ContextParallel` derives from this class for layers whose entries lie on several ranks.
    """

    # a layer leaves autocast and gradients itself, in fewer frames than `forward_mqa`
    attend: Callable[[ForwardCall], None] = staticmethod(attend)
    """Attention of one layer."""

    @property
    def ownership(self) -> Ownership | None:
        """Which entries this rank holds; None: all."""
        return None

    def together(self, what: str) -> AbstractContextManager[None]:
        """A block that fails on every rank if it fails on one. what: names the block in errors."""
        return nullcontext()

    def check_layer(
        self,
        prefix: str,
        layer: LayerGeometry,
        limits: Limits,
        backend: Backend,
        caches: LayerCaches,
        workspace: WorkspaceManager | None,
        *,
        has_sink: bool,
    ) -> None:
        """Raise ArgumentError, on every rank, unless all ranks bind the same layer to caches of the same layouts."""


ONE_RANK = Exchange()
