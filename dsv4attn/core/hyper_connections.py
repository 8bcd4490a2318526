"""`HyperConnections`: the residual streams around one sublayer, with their weights."""

from __future__ import annotations

from torch import Tensor

from dsv4attn.core.geometry import ModelGeometry
from dsv4attn.core.layer_ops import LayerSteps
from dsv4attn.core.layer_weights import HyperConnectionWeights

__all__ = ["HyperConnections"]


class HyperConnections:
    """Hyper-connections of one sublayer: `pre` makes its input from the streams, `post` puts its output back.

    In V4.1 the input is weighed by the pre of the sublayer before: `pre_delayed` and `after_delayed` take it and return
    their own, and the pre of the last sublayer of the network collapses the streams. steps: complete for these, as
    `definitions.complete_steps` has them.

    norm_weight: [d] - of the RMSNorm in front of the sublayer, or None. Raises ArgumentError unless the weights have
    the shapes of the model.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        weights: HyperConnectionWeights,
        steps: LayerSteps,
        norm_weight: Tensor | None = None,
    ) -> None:
        weights.check(geometry)
        eps, iterations = geometry.hc_eps, geometry.hc_sinkhorn_iters
        mixes = weights.fn.detach().float(), weights.scale.detach().float(), weights.base.detach().float()
        norm_weight = None if norm_weight is None else norm_weight.detach()
        self._mixes = *mixes, geometry.eps, eps, eps, 2.0, iterations, norm_weight, geometry.eps
        self._steps = steps

    def pre(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(post, comb, input of the sublayer [T, d]) of streams [T, n, d]."""
        return self._steps.mhc_pre(streams, *self._mixes)

    def after(
        self, other: Tensor, streams: Tensor, post: Tensor, comb: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(new streams, post, comb, input) from the output `other` [T, d] of the sublayer before this one."""
        return self._steps.mhc_fused_post_pre(other, streams, post, comb, *self._mixes)

    def post(self, x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """New streams [T, n, d] from the output x [T, d] of this sublayer."""
        return self._steps.mhc_post(x, streams, post, comb)

    def pre_delayed(self, streams: Tensor, previous_pre: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (pre [T, n], post, comb, input) of streams [T, n, d]. previous_pre: None in the first sublayer."""
        return self._steps.mhc_pre_delayed(streams, previous_pre, *self._mixes)

    def after_delayed(
        self, other: Tensor, streams: Tensor, post: Tensor, comb: Tensor, previous_pre: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (new streams, pre, post, comb, input) from the output `other` of the sublayer before, and its pre."""
        return self._steps.mhc_fused_post_pre_delayed(other, streams, post, comb, previous_pre, *self._mixes)

    def collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """V4.1: [T, d] of the last streams [T, n, d], by the pre [T, n] that the last sublayer returned."""
        return self._steps.mhc_collapse(streams, pre)
