"""`AttentionCall`: the arguments of one attention. `AttentionTensors`: those that differ between layers of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dsv4attn.core.cache.selected_keys import GatheredKeys, PagedKeys, RequestRows
from dsv4attn.core.contract.raw_query import RawQuery
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.reprs import fields_repr, frozen

if TYPE_CHECKING:
    # descriptors load where torch is not installed
    from torch import Tensor

    from dsv4attn.core.cache.layout import PagedKVCache

__all__ = ["AttentionCall", "AttentionOptions", "AttentionTensors", "Run"]


@frozen
class AttentionOptions:
    """What a call asks for in addition to out and lse. `forward_mqa` sets `raw_q` alone.

    max_logits: [T, H] fp32 or None - written with the largest z of each row, -inf for rows without keys. Only backends
       with `Capabilities.max_logits` take it.
    empty_lse: lse of rows without keys. Only backends with `Capabilities.empty_lse` take another value than -inf.
    raw_q: given if q is neither normalised nor rotated, and the call does both. Only backends get it
       whose `takes_raw_q` is true.
    """

    max_logits: Tensor | None = None
    empty_lse: float = -inf
    raw_q: RawQuery | None = None


_PLAIN = AttentionOptions()


class AttentionTensors(NamedTuple):
    """The tensors that differ between the layers of one prepared call, which keeps everything else.

    They have the signatures (`tensorspec.signature`) of the tensors that the call was prepared with. q, out, lse and
    topk_indices may have more rows after those of the call.

    q: [>= T, H, D] bf16 or fp32.
    out: [>= T, H, D] like q.
    lse: [>= T, H] fp32 or None.
    attn_sink: [H] fp32 or None.
    topk_indices: [>= T, K] int32 - the entries that the indexer selected; only calls of `Backend.prepare_entries` read
       them.
    window: the window cache; not read if keys are gathered.
    compressed: the compressed cache; not read if keys are gathered, nor on window-only layers.
    """

    q: Tensor
    out: Tensor
    lse: Tensor | None
    attn_sink: Tensor | None
    topk_indices: Tensor | None
    window: PagedKVCache
    compressed: PagedKVCache | None

    def __repr__(self) -> str:
        """With dtypes and shapes of tensors."""
        return fields_repr(self)

    def of_tokens(self, tokens: slice) -> AttentionTensors:
        """The rows of some tokens, without topk_indices.

        tokens: rows of q that stay.
        """
        q, out, lse, attn_sink, _, window, compressed = self
        lse = None if lse is None else lse[tokens]
        return AttentionTensors(q[tokens], out[tokens], lse, attn_sink, None, window, compressed)


# no slots: construction of frozen classes with slots takes twice as long, and the default of `Backend.prepare` makes a
# call in each run
@frozen(slots=False)
class AttentionCall:
    """One attention over selected keys. All segments are in one softmax.

    layer: geometry of the layer.
    q: [T, H, D] bf16 or fp32 - normalised and rotated, unless `options.raw_q` is given.
    keys: paged segments (window, then compressed if the layer has it), or gathered rows.
    attn_sink: [H] fp32 or None - one more logit per head, with value zero.
    out: [T, H, D] like q - every row is written.
    lse: [T, H] fp32 or None - natural log, without the sink.
    scratch: the views of `Backend.scratch`.
    options: see `AttentionOptions`.
    request_rows: which rows belong to one request and share keys, as `RequestRows` promises it, in a decode and on
       pages of a prompt; None: not known. A backend may ignore it: every row lists all of its keys.
    """

    layer: LayerGeometry
    q: Tensor
    keys: Sequence[PagedKeys] | GatheredKeys
    attn_sink: Tensor | None
    out: Tensor
    lse: Tensor | None
    scratch: Sequence[Tensor] = ()
    options: AttentionOptions = _PLAIN
    request_rows: RequestRows | None = None

    @property
    def tensors(self) -> AttentionTensors:
        """The tensors of the call itself: `backend.prepare(phase, call)(call.tensors)` computes the call."""
        window = compressed = None
        if not isinstance(self.keys, GatheredKeys):
            window, compressed = [*[segment.cache for segment in self.keys], None, None][:2]
        # a call on gathered keys reads no cache
        return AttentionTensors(self.q, self.out, self.lse, self.attn_sink, None, window, compressed)  # type: ignore[arg-type]

    def with_tensors(self, tensors: AttentionTensors) -> AttentionCall:
        """The same call on other tensors. Their rows after those of the call are cut off.

        tensors: tensors of the new call. They have at least as many rows as the call.
        """
        num_tokens, keys = self.q.shape[0], self.keys
        q, out, lse, attn_sink, _, window, compressed = tensors
        if num_tokens < q.shape[0]:
            q, out, lse = q[:num_tokens], out[:num_tokens], None if lse is None else lse[:num_tokens]
        if not isinstance(keys, GatheredKeys):
            caches = (window,) if compressed is None else (window, compressed)
            keys = [PagedKeys(cache, segment.rows) for cache, segment in zip(caches, keys, strict=False)]
        return AttentionCall(self.layer, q, keys, attn_sink, out, lse, self.scratch, self.options, self.request_rows)

    @property
    def max_logits(self) -> Tensor | None:
        """See `AttentionOptions`."""
        return self.options.max_logits

    @property
    def empty_lse(self) -> float:
        """See `AttentionOptions`."""
        return self.options.empty_lse

    @property
    def raw_q(self) -> RawQuery | None:
        """See `AttentionOptions`."""
        return self.options.raw_q


Run: TypeAlias = "Callable[[AttentionTensors], None]"
"""A prepared call of a backend: `run(tensors)` computes the call for the tensors of one layer."""
