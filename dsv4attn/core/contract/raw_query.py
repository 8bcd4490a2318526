"""`RawQuery`: what attention needs to normalise and rotate q itself, while it reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4attn.core.reprs import frozen

if TYPE_CHECKING:
    # types of the contract must load where torch is not wanted yet
    from torch import Tensor

__all__ = ["RawQuery"]


@frozen(eq=False)
class RawQuery:
    """q is the raw projection: neither normalised nor rotated. The call does both.

    The call does what `Backend.qnorm_rope_kv_insert` does, but rounds less: it rounds the rotated dims of q to q's
    dtype as the insert does, and does not round the other dims, because the factor of the norm multiplies logits. So
    logits are at least as exact as with the insert. Products of q and keys must be finite: the largest values of bf16
    overflow before the norm makes them small, and do not after an insert.

    positions: [T'] int64 - of each row of q; padding rows may have any.
    cos_sin_cache: [P, rope_dim] fp32, cosines before sines, with `rope.is_rotation`: a call may take the norm of q
       after the rotation.
    eps: of the norm.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    eps: float

    @property
    def key(self) -> tuple[object, ...]:
        """What a prepared call keeps of a RawQuery, with the addresses of both tensors."""
        tensors = self.positions, self.cos_sin_cache
        return (self.eps, *((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))

    def of(self, tokens: slice) -> RawQuery:
        """The RawQuery of some rows of q.

        tokens: rows of q that stay.
        """
        return RawQuery(self.positions[tokens], self.cos_sin_cache, self.eps)
