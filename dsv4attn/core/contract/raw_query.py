"""`RawQuery`: what attention needs to normalise and rotate q itself, while it reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    # types of the contract must load where torch is not wanted yet
    from torch import Tensor

__all__ = ["RawQuery"]


@frozen(eq=False)
class RawQuery:
    """q is the raw projection: neither normalised nor rotated. The call does both.

    It does what `Backend.qnorm_rope_kv_insert` does, with one difference.

    Rotated dims of q are rounded to its dtype, as they are by that step; other dims are not, and the factor of the norm
    multiplies logits. So logits are at least as exact as with the step. Products of q and keys must be finite: the
    largest values of bf16 overflow before the norm makes them small, where the step's q does not.

    positions: [T'] int64, of each row of q; padding rows may have any. cos_sin_cache: [P, rope_dim] fp32, cosines
    before sines, with `rope.is_rotation`: a call may take the norm of q after the rotation. eps: of the norm.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    eps: float

    @property
    def key(self) -> tuple[object, ...]:
        """What a prepared call binds of a RawQuery: the addresses of both tensors too."""
        tensors = self.positions, self.cos_sin_cache
        return (self.eps, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))

    def of(self, tokens: slice) -> RawQuery:
        """The RawQuery of some rows of q."""
        return RawQuery(self.positions[tokens], self.cos_sin_cache, self.eps)
