"""Metadata of a step: the builder, and the checks of what an engine gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

RENAMED = {"DeepseekSparseSWAMetadata": "WindowMetadata", "FlashMLASparseMetadata": "CompressedMetadata"}
"""Old names, and the public ones."""
_PUBLIC = {name: name for name in ("AttentionMetadata", "Batch", "MetadataBuilder", *RENAMED.values())} | RENAMED

if not TYPE_CHECKING:
    # hidden from type checkers, for which it would mean that every name exists.
    def __getattr__(name: str) -> object:
        """Answer an old name, or a name of a module below, with the public one."""
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # not an AttributeError, whose text `from ... import` hides
        raise ImportError(f"{__name__}.{name} has another name now -> write dsv4attn.{_PUBLIC[name]}")
