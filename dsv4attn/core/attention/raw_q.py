"""Inserts that leave q of prefill tokens as it was projected: where that is faster, and in which steps."""

from __future__ import annotations

from weakref import WeakSet

from torch import Tensor

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import Backend, RawQuery
from dsv4attn.core.metadata.metadata import AttentionMetadata, WindowMetadata
from dsv4attn.core.tensorspec import signature
from dsv4attn.core.torch_modes import is_capturing

__all__ = ["RawQSteps", "insert_with_raw_q", "prefill_takes_raw_q"]


def prefill_takes_raw_q(call: ForwardCall) -> bool:
    """Whether `forward_mqa` is to be given a `RawQuery` for the prefill tokens of a step.

    Then only the first `metadata.swa.num_decode_tokens` rows of q are to be normalised and rotated before
    (`insert_with_raw_q`), and all chunks' keys are gathered. Tables of angles must have `rope.is_rotation`. The answer
    depends on no value of q, and is memoised in the metadata. While a graph is captured it is False.
    call: the attention that follows; its out may be q, as only the shape, strides and dtype count.
    """
    metadata = call.metadata
    assert metadata is not None
    divided = metadata.ownership is not None and call.layer.has_entries
    if not metadata.swa.num_prefill_tokens or call.layer.q_eps is None or divided:
        return False
    if is_capturing(call.q.device):
        # engines replay inserts before attention that is in no graph
        return False
    owners = call.backend, call.layer, call.limits, call.workspace, metadata.compressed, call.caches.signature
    key = *map(id, owners), signature(call.q)
    answer = metadata.swa.takes_raw_q.get(key)
    if answer is None:
        takes = call.gathers and call.takes_raw_q(call.chunks())
        # the owners are kept, so that their identities stay theirs
        answer = metadata.swa.takes_raw_q[key] = takes, owners
    return answer[0]


def insert_with_raw_q(
    backend: Backend, q: Tensor, kv: Tensor, cache: PagedKVCache, slot_mapping: Tensor, raw_q: RawQuery, prepared: int
) -> None:
    """`Backend.qnorm_rope_kv_insert`, but q is normalised and rotated in its first `prepared` rows alone.

    That is for a backend with `takes_raw_q`. All rows of kv are inserted.
    """
    for rows, heads in ((slice(prepared), slice(None)), (slice(prepared, None), slice(0))):
        raw_rows = raw_q.of(rows)
        if raw_rows.positions.shape[0]:
            slots, positions, table = slot_mapping[rows], raw_rows.positions, raw_rows.cos_sin_cache
            backend.qnorm_rope_kv_insert(q[rows, heads], kv[rows], cache, slots, positions, table, raw_rows.eps)


class RawQSteps:
    """The steps in which the insert of one layer left q of prefill tokens raw.

    Attention of such a step gets a `RawQuery`. Steps may interleave. They are named by their window metadata, which
    this object does not keep alive. A copy knows no step.
    """

    def __init__(self) -> None:
        self._steps: WeakSet[WindowMetadata] = WeakSet()

    def __reduce__(self) -> tuple[type[RawQSteps], tuple[()]]:
        """Copies and pickles are new."""
        return type(self), ()

    def __contains__(self, metadata: AttentionMetadata) -> bool:
        """Whether q of a step is raw."""
        return metadata.swa in self._steps

    def insert(self, call: ForwardCall, kv: Tensor, raw_q: RawQuery) -> bool:
        """Insert the keys of a step, and prepare q of decode tokens alone, if prefill takes the other rows raw.

        Else nothing is written, and False is returned.
        call: the attention that follows, see `prefill_takes_raw_q`.
        kv: [T', D].
        raw_q: of all rows of q.
        """
        metadata = call.window_metadata
        self._steps.discard(metadata)
        if not prefill_takes_raw_q(call):
            return False
        slots, num_prepared = metadata.slot_mapping, metadata.num_decode_tokens
        insert_with_raw_q(call.backend, call.q, kv, call.caches.swa, slots, raw_q, num_prepared)
        self._steps.add(metadata)
        return True
