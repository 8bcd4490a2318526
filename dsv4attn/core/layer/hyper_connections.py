"""`HyperConnections`: the residual streams around one sublayer, with their weights.

Code that torch compiles sees what reads weights as one custom op, `torch.ops.dsv4attn.hyper_connections`, which looks
at the weights when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.attention.custom_ops import Handles, define_op
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.model.weight_copies import WeightCopies, check_not_captured
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.core.reprs import one_line
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import MixWeights
from dsv4attn.errors import ArgumentError

__all__ = ["HyperConnections"]

_handles: Handles[HyperConnections] = Handles()


class HyperConnections:
    """Hyper-connections of one sublayer: `pre` makes its input from the streams, `post` puts its output back.

    In V4.1 the pre of the previous sublayer weighs the streams. `pre_delayed` and `after_delayed` take that pre and
    return their own, and the pre of the last sublayer of the network collapses the streams.

    geometry: of the model.
    weights: fn, base and scale of the sublayer.
    layer_ops: the table of ops of the layer's backend.
    norm_weight: [d] bf16 or fp32 - of the RMSNorm of the input of the sublayer, or None.
    Raises ArgumentError unless the weights have the shapes of the model and are on one device.

    A change of a weight is noticed before each `pre` and `after`, eager or compiled, as `DeepseekV4Attention` notices
    it. After other changes call `refresh`.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        weights: HyperConnectionWeights,
        layer_ops: LayerOps,
        norm_weight: Tensor | None = None,
    ) -> None:
        self._geometry, self._layer_ops, self._copies = geometry, layer_ops, WeightCopies()
        self._load(weights, norm_weight)
        self._handle = _handles.give(self, "hyper_connections")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has weights of its own, in compiled code too."""
        self.__dict__.update(state)
        self._handle = _handles.give(self, "hyper_connections")

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Number and width of the streams, and device."""
        yield f"{self._geometry.hc_mult} streams of {self._geometry.hidden_size}"
        yield f"on {self._loaded_weights.fn.device}"

    def _load(self, weights: HyperConnectionWeights, norm_weight: Tensor | None) -> None:
        """Take weights, and make copies of those that are not fp32."""
        geometry, copies = self._geometry, self._copies
        weights.check(geometry)
        if norm_weight is not None:
            dtypes = torch.bfloat16, torch.float32
            check_tensor("norm_weight", norm_weight, str(geometry.hidden_size), dtypes, {}, any_strides=True)
        check_same_device(
            weights.fn,
            "hyper_connections.fn",
            **{"hyper_connections.base": weights.base, "hyper_connections.scale": weights.scale},
            norm_weight=norm_weight,
        )
        with torch.inference_mode(mode=False), torch.no_grad(), copies.taking():
            self._loaded_weights = MixWeights(
                fn=copies.plain("fn", weights.fn, torch.float32),
                hc_scale=copies.plain("scale", weights.scale, torch.float32),
                hc_base=copies.plain("base", weights.base, torch.float32),
                rms_eps=geometry.eps,
                hc_pre_eps=geometry.hc_eps,
                hc_sinkhorn_eps=geometry.hc_eps,
                sinkhorn_repeat=geometry.hc_sinkhorn_iters,
                norm_weight=None if norm_weight is None else copies.plain("norm_weight", norm_weight),
                norm_eps=geometry.eps,
            )
        self._weights, self._norm_weight = weights, norm_weight

    def refresh(self, weights: HyperConnectionWeights | None = None, norm_weight: Tensor | None = None) -> None:
        """Make every copy of a weight again, in the same memory; see `DeepseekV4Attention.refresh`.

        weights, norm_weight: new ones, on the device of the present ones. None: the present ones stay.
        """
        weights = self._weights if weights is None else weights
        norm_weight = self._norm_weight if norm_weight is None else norm_weight
        device = self._loaded_weights.fn.device
        check_not_captured(device, "hyper-connections")
        if weights.fn.device != device:
            expected, actual = f"a tensor on {device}", f"one on {weights.fn.device}"
            hint = "make the hyper-connections again"
            raise ArgumentError("hyper_connections.fn", expected=expected, actual=actual, hint=hint)
        self._load(weights, norm_weight)

    def _run(self, op: str, *tensors: Tensor | None) -> Any:  # noqa: ANN401 - as many tensors as the op gives
        """What an op of the backend gives, with the weights as they are now."""
        if torch.compiler.is_compiling():
            return tuple(_op(tensors, op, self._handle))
        if self._copies.changed():
            self.refresh()
        return getattr(self._layer_ops, op)(*tensors, self._loaded_weights)

    @without_modes
    def pre(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(post, comb, input of the sublayer [T, d]) of streams [T, n, d].

        streams: [T, n, d] residual streams.
        """
        return self._run("mhc_pre", streams)  # type: ignore[no-any-return]

    @without_modes
    def after(
        self, previous_output: Tensor, streams: Tensor, post: Tensor, comb: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(new streams, post, comb, input) from the output [T, d] of the previous sublayer, and its post and comb.

        previous_output: [T, d] output of the previous sublayer.
        streams: [T, n, d] that the previous sublayer began with.
        post: [T, n, 1] fp32 of the previous sublayer.
        comb: [T, n, n] fp32 of the previous sublayer.
        """
        return self._run("mhc_fused_post_pre", previous_output, streams, post, comb)  # type: ignore[no-any-return]

    @without_modes
    def post(self, x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """New streams [T, n, d] from the output x [T, d] of this sublayer.

        x: [T, d] output of this sublayer.
        streams: [T, n, d] that this sublayer began with.
        post: [T, n, 1] fp32 that `pre` or `after` returned.
        comb: [T, n, n] fp32 that `pre` or `after` returned.
        """
        return self._layer_ops.mhc_post(x, streams, post, comb)

    @without_modes
    def pre_delayed(self, streams: Tensor, previous_pre: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (pre [T, n], post, comb, input) of streams [T, n, d].

        streams: [T, n, d] residual streams.
        previous_pre: [T, n] of the previous sublayer; None in the first sublayer.
        """
        return self._run("mhc_pre_delayed", streams, previous_pre)  # type: ignore[no-any-return]

    @without_modes
    def after_delayed(
        self, previous_output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, previous_pre: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (new streams, pre, post, comb, input) from the output of the previous sublayer, and its mixes.

        previous_output: [T, d] output of the previous sublayer.
        streams: [T, n, d] that the previous sublayer began with.
        post: [T, n, 1] fp32 of the previous sublayer.
        comb: [T, n, n] fp32 of the previous sublayer.
        previous_pre: [T, n] of the previous sublayer; None after the first sublayer.
        """
        tensors = previous_output, streams, post, comb, previous_pre
        return self._run("mhc_fused_post_pre_delayed", *tensors)  # type: ignore[no-any-return]

    @without_modes
    def collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """V4.1: [T, d] of the last streams [T, n, d], by the pre [T, n] that the last sublayer returned.

        streams: [T, n, d] after the last sublayer.
        pre: [T, n] that the last sublayer returned.
        """
        return self._layer_ops.mhc_collapse(streams, pre)


@without_modes
def _hyper_connections(tensors: Sequence[Tensor | None], op: str, layer: str) -> list[Tensor]:
    # dense, as the compiler is told; of kernels and of torch's definitions they are
    return [out.contiguous() for out in _handles.layer(layer)._run(op, *tensors)]  # noqa: SLF001 - it is its op


def _shaped(tensors: Sequence[Tensor | None], op: str, layer: str) -> list[Tensor]:
    """Results of the op, without values: new streams after another sublayer, pre of V4.1, post, comb, input."""
    streams = tensors["post_pre" in op]
    assert streams is not None
    count, n, d = streams.shape
    mixes = [streams.new_empty(count, *sizes, dtype=torch.float32) for sizes in ((n,), (n, 1), (n, n))]
    whole = [streams.new_empty(streams.shape)] if "post_pre" in op else []
    return [*whole, *mixes["delayed" not in op :], streams.new_empty(count, d)]


_op = define_op("hyper_connections(Tensor?[] tensors, str op, str layer) -> Tensor[]", _hyper_connections, _shaped)
