"""`HyperConnections`: the residual streams around one sublayer, with their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.model.weight_copies import WeightCopies, check_not_captured
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError

__all__ = ["HyperConnections"]


class HyperConnections:
    """Hyper-connections of one sublayer: `pre` makes its input from the streams, `post` puts its output back.

    In V4.1 the input is weighed by the pre of the sublayer before: `pre_delayed` and `after_delayed` take it and return
    their own, and the pre of the last sublayer of the network collapses the streams.

    norm_weight: [d] - of the RMSNorm in front of the sublayer, or None. Raises ArgumentError unless the weights have
    the shapes of the model.

    Weights that change are seen as those of `DeepseekV4Attention` are, before each `pre` and `after`. After other
    writes call `refresh`.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        weights: HyperConnectionWeights,
        steps: LayerOps,
        norm_weight: Tensor | None = None,
    ) -> None:
        self._geometry, self._steps, self._copies = geometry, steps, WeightCopies()
        self._load(weights, norm_weight)

    def _load(self, weights: HyperConnectionWeights, norm_weight: Tensor | None) -> None:
        """Take weights, and make copies of those that are not fp32."""
        geometry, copies = self._geometry, self._copies
        weights.check(geometry)
        eps, iterations = geometry.hc_eps, geometry.hc_sinkhorn_iters
        with torch.inference_mode(mode=False), torch.no_grad():
            mixes = [copies.alias(name, getattr(weights, name), torch.float32) for name in ("fn", "scale", "base")]
            norm = None if norm_weight is None else copies.alias("norm_weight", norm_weight)
        self._kept: tuple[Any, ...] = *mixes, geometry.eps, eps, eps, 2.0, iterations, norm, geometry.eps
        self._weights, self._norm_weight = weights, norm_weight

    def refresh(self, weights: HyperConnectionWeights | None = None, norm_weight: Tensor | None = None) -> None:
        """Make every copy of a weight again, in the same memory; see `DeepseekV4Attention.refresh`.

        weights, norm_weight: others to take from now on, on the device of those before; None: those before.
        """
        weights = self._weights if weights is None else weights
        norm_weight = self._norm_weight if norm_weight is None else norm_weight
        device = self._kept[0].device
        check_not_captured(device, "hyper-connections")
        for name in ("fn", "scale", "base"):
            if getattr(weights, name).device != device:
                actual = f"one on {getattr(weights, name).device}"
                raise ArgumentError(f"hyper_connections.{name}", expected=f"a tensor on {device}", actual=actual)
        self._load(weights, norm_weight)

    @property
    def _mixes(self) -> tuple[Any, ...]:
        """Arguments of the steps, from the weights as they are now."""
        if not torch.compiler.is_compiling() and self._copies.changed():
            self.refresh()
        return self._kept

    @without_modes
    def pre(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(post, comb, input of the sublayer [T, d]) of streams [T, n, d]."""
        return self._steps.mhc_pre(streams, *self._mixes)

    @without_modes
    def after(
        self, other: Tensor, streams: Tensor, post: Tensor, comb: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(new streams, post, comb, input) from the output `other` [T, d] of the sublayer before this one."""
        return self._steps.mhc_fused_post_pre(other, streams, post, comb, *self._mixes)

    @without_modes
    def post(self, x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """New streams [T, n, d] from the output x [T, d] of this sublayer."""
        return self._steps.mhc_post(x, streams, post, comb)

    @without_modes
    def pre_delayed(self, streams: Tensor, previous_pre: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (pre [T, n], post, comb, input) of streams [T, n, d]. previous_pre: None in the first sublayer."""
        return self._steps.mhc_pre_delayed(streams, previous_pre, *self._mixes)

    @without_modes
    def after_delayed(
        self, other: Tensor, streams: Tensor, post: Tensor, comb: Tensor, previous_pre: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (new streams, pre, post, comb, input) from the output `other` of the sublayer before, and its pre."""
        return self._steps.mhc_fused_post_pre_delayed(other, streams, post, comb, previous_pre, *self._mixes)

    @without_modes
    def collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """V4.1: [T, d] of the last streams [T, n, d], by the pre [T, n] that the last sublayer returned."""
        return self._steps.mhc_collapse(streams, pre)
