"""`ContextParallel`: attention over one sequence whose compressed entries lie on the ranks of a process group."""

from __future__ import annotations

from attrs import frozen

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.context_parallel.attention import forward_mqa_over_ranks
from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry

__all__ = ["ContextParallel"]


@frozen(eq=False, slots=False)
class ContextParallel(RankExchange):
    """A process group whose ranks hold a part of every compressed cache and of the index keys each.

    Windows and compressor states are on every rank. All ranks run the same steps with the same tokens.

    group: of torch.distributed, gloo or NCCL; this rank is one of its ranks.
    interleave: consecutive entries of one rank, see `Ownership`. It divides the records in every compressed page.
    divides_heads: whether the ranks divide the query heads too, as an engine does whose context group is part of its
       tensor parallel group: geometries, weights, queries and sinks are of the heads of one rank, equally many on all.
       False: all ranks have the same heads.
    prefill_keys: whether prefill may gather the compressed keys of all ranks, where it sends less that way. It takes
       memory for the keys of one longest sequence, see `plan_workspace`.
    """

    def attend(self, call: ForwardCall) -> None:
        """Attend over the entries of all ranks, see `forward_mqa_over_ranks`.

        call: the arguments of `forward_mqa` on this rank.
        """
        forward_mqa_over_ranks(self, call)

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
        """Raise ArgumentError, on every rank, unless all ranks bind the same layer, and have memory for its plan.

        prefix: name of the layer.
        layer: geometry of the layer.
        limits: of all batches.
        backend: the backend of the layer.
        caches: the caches to bind.
        workspace: the workspace to hold the plan, or None.
        has_sink: whether the layer has a sink.
        """
        self.check_bound(prefix, layer, limits, caches, attn_sink=has_sink)
        if workspace is not None:
            self.check_workspace(prefix, workspace, self.plan(layer, limits, backend, caches.swa.layout))
