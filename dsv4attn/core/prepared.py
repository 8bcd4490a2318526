"""What layers of a kind share within a step: worked out and checked for the first, known for the others.

All of it stands in a workspace, by `keep` and `recall`, and goes with its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.keys import DenseIndices, RaggedIndices
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata, DeepseekSparseSWAMetadata, FlashMLASparseMetadata
from dsv4attn.core.tensorspec import tell

__all__ = ["Known", "PagedCall", "Room", "Rows", "Work", "address_of"]

Rows: TypeAlias = DenseIndices | RaggedIndices
"""Slots that each token of a call attends to."""
Work: TypeAlias = Callable[[], Callable[[], None] | None]
"""A step of a backend with its arguments. What it returns does the same again, faster."""


class Room(NamedTuple):
    """What a call on pages has in the workspace. slots, ragged: of each segment, where its rows are not there already.

    scratch: the backend's own. kept: whom the room is known by.
    """

    slots: tuple[DenseIndices | None, ...]
    ragged: tuple[RaggedIndices | None, ...]
    scratch: Sequence[Tensor]
    kept: tuple[object, ...]


class PagedCall(NamedTuple):
    """A call on pages, but for the addresses of q, out, lse, sink and caches.

    tokens: whom it is for. rows: of each segment. work: what writes those of them that are not there already, to be run
    before every call. found: what the backend keeps of it.
    """

    tokens: slice
    rows: tuple[Rows, ...]
    work: list[Work]
    room: Room
    found: dict[object, Any]


class Known(NamedTuple):
    """A decode call whose step was checked, and all that call and checks follow from, besides backend and layer.

    swa, compressed, limits: compared by identity. caches, tensors: shapes, strides, dtypes and devices. topk: a tensor
    of its own over the entry numbers that `call` reads: the caller's may be given other memory.
    """

    swa: DeepseekSparseSWAMetadata
    compressed: FlashMLASparseMetadata | None
    topk: Tensor | None
    limits: Limits
    caches: Sequence[object]
    tensors: Sequence[object]
    call: PagedCall

    def serves(self, metadata: object, topk: object, limits: object, caches: object, tensors: Sequence[object]) -> bool:
        """Whether a step differs from this one in addresses alone. tensors: q, out, attn_sink, lse and topk."""
        return (
            isinstance(metadata, AttentionMetadata)
            and isinstance(caches, LayerCaches)
            and metadata.swa is self.swa
            and metadata.compressed is self.compressed
            and address_of(topk) == address_of(self.topk)
            and limits is self.limits
            and caches.told == self.caches
            and tell(*tensors) == self.tensors
        )


def address_of(value: object) -> int | None:
    """Where a tensor's memory begins; None for what is no tensor."""
    return value.data_ptr() if isinstance(value, Tensor) else None
