"""Inserts that leave q of prefill tokens as it was projected: where that is faster, and in which steps."""

from __future__ import annotations

from torch import Tensor

from dsv4attn.core.attention.call import Step
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import Backend, RawQuery, complete
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import signature
from dsv4attn.core.torch_modes import is_capturing

__all__ = ["insert_leaving_raw_q", "insert_with_raw_q", "prefill_takes_raw_q"]


def prefill_takes_raw_q(
    q: Tensor,
    caches: LayerCaches,
    metadata: AttentionMetadata,
    backend: Backend,
    workspace: WorkspaceManager,
    *,
    layer: LayerGeometry,
    limits: Limits,
) -> bool:
    """Whether `forward_mqa` is to be given a `RawQuery` for the prefill tokens of a step.

    Then only the first `metadata.swa.num_decode_tokens` rows of q are to be normalised and rotated before
    (`insert_with_raw_q`), and all chunks' keys are gathered. Tables of angles must have `rope.is_rotation`. Arguments
    as those of `forward_mqa`. The answer depends on no value of q, and is memoised in the metadata. While a graph is
    captured it is False.
    """
    swa = metadata.swa
    divided = metadata.ownership is not None and layer.has_entries
    if not swa.num_prefill_tokens or layer.q_eps is None or divided:
        return False
    if is_capturing(q.device):
        # engines replay inserts before attention that is in no graph
        return False
    owners = backend, layer, limits, workspace, metadata.compressed, caches.signature
    key = *map(id, owners), signature(q)
    found = swa.takes_raw_q.get(key)
    if found is None:
        whole = complete(backend)
        step = Step(q, caches, metadata, whole, workspace, q, layer, limits, None, None, None)
        found = step.gathers and step.takes_raw_q(step.chunks()), owners
        swa.takes_raw_q[key] = found
    return found[0]


def insert_with_raw_q(
    backend: Backend, q: Tensor, kv: Tensor, cache: PagedKVCache, slot_mapping: Tensor, raw_q: RawQuery, prepared: int
) -> None:
    """`Backend.qnorm_rope_kv_insert`, but q is normalised and rotated in its first `prepared` rows alone.

    That is for a backend with `takes_raw_q`. All rows of kv are inserted.
    """
    for rows, heads in ((slice(prepared), slice(None)), (slice(prepared, None), slice(0))):
        part = raw_q.of(rows)
        if part.positions.shape[0]:
            given = cache, slot_mapping[rows], part.positions, part.cos_sin_cache, part.eps
            backend.qnorm_rope_kv_insert(q[rows, heads], kv[rows], *given)


def insert_leaving_raw_q(
    owner: object,
    q: Tensor,
    kv: Tensor,
    raw_q: RawQuery,
    caches: LayerCaches,
    metadata: AttentionMetadata,
    backend: Backend,
    workspace: WorkspaceManager,
    *,
    layer: LayerGeometry,
    limits: Limits,
) -> bool:
    """Insert the keys of a step, and prepare q of decode tokens alone, if prefill takes the other rows raw.

    Else nothing is written. owner: the layer, which is in the step's `layers_with_raw_q` then, and attends with a
    `RawQuery`; so steps may interleave. kv: [T', D]. Other arguments as those of `forward_mqa`.
    """
    swa = metadata.swa
    swa.layers_with_raw_q.discard(owner)
    if not prefill_takes_raw_q(q, caches, metadata, backend, workspace, layer=layer, limits=limits):
        return False
    insert_with_raw_q(backend, q, kv, caches.swa, swa.slot_mapping, raw_q, swa.num_decode_tokens)
    swa.layers_with_raw_q.add(owner)
    return True
