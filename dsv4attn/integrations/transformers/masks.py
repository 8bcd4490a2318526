"""`VisibleKeys`: the keys that an additive mask of transformers lets each query see, as indices for a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.selected_keys import DenseIndices, RaggedIndices
from dsv4attn.core.contract.backend import IndexForm
from dsv4attn.core.reprs import frozen
from dsv4attn.errors import ArgumentError, UnsupportedError

ABSENT = -1e4
"""A key whose mask is this or less has weight 0 in fp32, whatever its logit."""
_MASK = "the additive mask that transformers makes for eager attention: 0, or the least value of its dtype"


@frozen(eq=False)
class VisibleKeys:
    """The keys of each query of a batch: N sequences of S queries and L keys.

    rows: [n] int32 - visible rows of the keys [N * L, D], query after query, ascending within a query.
    query: [n] int64 - the query in 0 .. N * S - 1 that sees each of them.
    counts: [N * S] int32 - keys of each query.
    width: most keys of a query, on the host.
    """

    rows: Tensor
    query: Tensor
    counts: Tensor
    width: int

    @classmethod
    def of_mask(cls, mask: Tensor, sequences: int, queries: int, keys: int) -> VisibleKeys:
        """Read an additive mask: a key is visible where it is 0. Reads three numbers on the host.

        mask: [N or 1, 1, S, L], any float dtype - 0, or -1e4 and less. Raises ArgumentError for another shape or dtype,
        and UnsupportedError for other values: a bias, or a NaN.
        """
        shape = (sequences, 1, queries, keys)
        if mask.ndim != 4 or (1, *mask.shape[1:]) != (1, *shape[1:]) or mask.shape[0] not in (1, sequences):
            raise ArgumentError("attention_mask", expected=f"shape {list(shape)}", actual=list(mask.shape))
        if not mask.is_floating_point():
            raise ArgumentError("attention_mask", expected=f"floats, {_MASK}", actual=mask.dtype)
        visible = mask == 0
        unexpected = (visible ^ ~(mask <= ABSENT)).any()
        keys_seen = cls._of(visible[:, 0].expand(sequences, queries, keys), unexpected)
        if keys_seen is None:
            hint = 'for a mask with biases use attn_implementation="eager"'
            raise UnsupportedError("attention_mask", expected=_MASK, actual="other values", hint=hint)
        return keys_seen

    @classmethod
    def of_window(
        cls, sequences: int, queries: int, keys: int, window: int | None, device: torch.device
    ) -> VisibleKeys:
        """Without a mask: the queries are the last S of L tokens, and each sees `window` tokens, itself included.

        window: None for a layer with compressed keys, whose only query sees all keys. Raises UnsupportedError for more
        queries of such a layer: the number of compressed keys among L, and so which of them are visible, is unknown.
        """
        if window is None and queries > 1:
            actual = f"None, with {queries} queries over compressed keys"
            hint = "call the model, which makes the mask, instead of the layer"
            raise UnsupportedError("attention_mask", expected=_MASK, actual=actual, hint=hint)
        newest = torch.arange(keys - queries, keys, device=device)[:, None]
        age = newest - torch.arange(keys, device=device)
        visible = (age >= 0) & (age < (keys if window is None else window))
        keys_seen = cls._of(visible.expand(sequences, queries, keys), visible.new_zeros(()))
        assert keys_seen is not None
        return keys_seen

    @classmethod
    def _of(cls, visible: Tensor, refused: Tensor) -> VisibleKeys | None:
        """visible: [N, S, L] bool. refused: [] bool - None is returned where it is true."""
        counts = visible.sum(-1, dtype=torch.int32).flatten()
        width, bad = torch.stack((counts.amax(), refused.to(torch.int32))).tolist()
        if bad:
            return None
        sequence, query, key = visible.nonzero(as_tuple=True)
        rows = (sequence * visible.shape[2] + key).to(torch.int32)
        return cls(rows, sequence * visible.shape[1] + query, counts, width)

    def indices(self, form: IndexForm, alignment: int) -> DenseIndices | RaggedIndices:
        """The keys in the form of a backend. alignment: the number of columns of a dense matrix is a multiple of it."""
        width, ends = round_up(max(self.width, 1), alignment), self.counts.cumsum(0, dtype=torch.int32)
        if form is IndexForm.RAGGED:
            return RaggedIndices(self.rows, torch.nn.functional.pad(ends, (1, 0)), width)
        matrix = self.rows.new_full((self.counts.shape[0], width), -1)
        column = torch.arange(self.rows.shape[0], device=self.rows.device) - (ends - self.counts)[self.query]
        matrix[self.query, column] = self.rows
        return DenseIndices(matrix, self.counts)
