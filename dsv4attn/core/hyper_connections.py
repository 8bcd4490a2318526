"""`HyperConnections`: the residual streams around one sublayer, with their weights."""

from __future__ import annotations

from torch import Tensor

from dsv4attn.core.geometry import ModelGeometry
from dsv4attn.core.layer_ops import LayerSteps
from dsv4attn.core.layer_weights import HyperConnectionWeights

__all__ = ["HyperConnections"]


class HyperConnections:
    """Hyper-connections of one sublayer: `pre` makes its input from the streams, `post` puts its output back.

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
