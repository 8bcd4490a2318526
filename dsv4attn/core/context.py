"""The metadata of the step being run, seen by the layers called inside it. Context-local: threads do not mix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import frozen

from dsv4attn.core.metadata import AttentionMetadata, DeepseekSparseSWAMetadata, FlashMLASparseMetadata
from dsv4attn.errors import NoForwardContextError

__all__ = ["ForwardContext", "get_forward_context", "set_forward_context"]

Metadata = Mapping[str, "DeepseekSparseSWAMetadata | FlashMLASparseMetadata | None"]


@frozen
class ForwardContext:
    """attn_metadata: by prefix of a cache layer; None as a whole means warm-up."""

    attn_metadata: Metadata | None

    def for_layer(self, prefix: str, swa_prefix: str, *, compressed: bool) -> AttentionMetadata | None:
        """Metadata of one layer, None in a warm-up. The layer, not the dict, says whether `prefix` is looked up."""
        if self.attn_metadata is None:
            return None
        swa = self.attn_metadata.get(swa_prefix)
        part = self.attn_metadata.get(prefix) if compressed else None
        if not isinstance(swa, DeepseekSparseSWAMetadata):
            raise NoForwardContextError(_missing(swa_prefix, DeepseekSparseSWAMetadata, swa, self.attn_metadata))
        if compressed and not isinstance(part, FlashMLASparseMetadata):
            raise NoForwardContextError(_missing(prefix, FlashMLASparseMetadata, part, self.attn_metadata))
        return AttentionMetadata(swa, part if isinstance(part, FlashMLASparseMetadata) else None)


def _missing(key: str, wanted: type, found: object, metadata: Metadata) -> str:
    got = "nothing" if found is None else type(found).__name__
    return (
        f"attn_metadata[{key!r}]: expected {wanted.__name__}, got {got} (keys: {', '.join(sorted(metadata)) or 'none'})"
    )


_context: ContextVar[ForwardContext | None] = ContextVar("dsv4attn_forward", default=None)


@contextmanager
def set_forward_context(attn_metadata: Metadata | None) -> Iterator[ForwardContext]:
    """Run a step: `prefix` of each layer to its compressed metadata, `swa_prefix` to its window metadata."""
    context = ForwardContext(attn_metadata)
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


def get_forward_context() -> ForwardContext:
    """The step being run. Raises NoForwardContextError outside one."""
    context = _context.get()
    if context is None:
        raise NoForwardContextError("no step is being run -> call layers inside `with set_forward_context(metadata):`")
    return context
