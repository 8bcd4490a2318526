"""`set_forward_context`: the metadata of the current step, for the layers called in it. Local to a thread or task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from attrs import field
from torch import Tensor

from dsv4attn.core.metadata.metadata import (
    AttentionMetadata,
    CompressedMetadata,
    CompressorMetadata,
    LayerKey,
    WindowMetadata,
)
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.reprs import frozen
from dsv4attn.errors import ArgumentError, NoForwardContextError, UnknownNameError, did_you_mean

__all__ = ["ForwardContext", "get_forward_context", "runs_as_captured", "set_forward_context"]

Metadata: TypeAlias = (
    "Mapping[LayerKind, AttentionMetadata] | Mapping[LayerKey, AttentionMetadata] | Mapping[str, AttentionMetadata]"
    "| Mapping[str, WindowMetadata | CompressedMetadata | CompressorMetadata | None]"
)


@frozen
class ForwardContext:
    """The step that is being run.

    attn_metadata: by kind of layer, or (kind, ratio), or by prefix of a cache layer. None means warm-up.
    as_captured: whether layers do what they do while a graph is captured.
    record_entries, inject_entries: see `set_forward_context`.
    """

    attn_metadata: Metadata | None
    as_captured: bool = False
    record_entries: Mapping[str, Tensor] = field(factory=dict, repr=False)
    inject_entries: Mapping[str, Tensor] = field(factory=dict, repr=False)
    _selecting: set[str] = field(factory=set, init=False, repr=False, eq=False)

    def entries(self, prefix: str) -> tuple[Tensor | None, Tensor | None]:
        """Where the selecting layer of this prefix records its entries, and entries that it takes; None for neither."""
        self._selecting.add(prefix)
        return self.record_entries.get(prefix), self.inject_entries.get(prefix)

    def check_entries_used(self) -> None:
        """Raise ArgumentError if entries are named for a layer that has not selected in this step."""
        for name in ("record_entries", "inject_entries"):
            unused = [prefix for prefix in getattr(self, name) if prefix not in self._selecting]
            if unused:
                expected = "prefixes of layers that ran in this step and select entries"
                actual = f"{unused[0]!r}{did_you_mean(str(unused[0]), self._selecting)}"
                raise ArgumentError(name, expected=expected, actual=actual)

    def for_layer(
        self, prefix: str, swa_prefix: str, kind: LayerKind, compress_ratio: int | None = None
    ) -> AttentionMetadata | None:
        """Metadata of one layer, None in a warm-up. `prefix` is not looked up for window-only layers.

        Raises ArgumentError for metadata whose builder has built another step since, but with `as_captured`.
        """
        if self.attn_metadata is None:
            return None
        entries: Mapping[Any, Any] = self.attn_metadata
        swa, compressed = entries.get(swa_prefix), kind is not LayerKind.SWA
        if swa is None:
            both = entries.get(kind) or entries.get((kind, compress_ratio))
            if isinstance(both, AttentionMetadata):
                state = both.swa.build_state
                if state is not None and not state.is_last:
                    self._refuse_earlier_build()
                return both
        part = entries.get(prefix) if compressed else None
        if not isinstance(swa, WindowMetadata):
            raise NoForwardContextError(_missing(swa_prefix, WindowMetadata, swa, entries, kind))
        if compressed and not isinstance(part, CompressedMetadata):
            raise NoForwardContextError(_missing(prefix, CompressedMetadata, part, entries, kind))
        if swa.build_state is not None and not swa.build_state.is_last:
            self._refuse_earlier_build()
        state = entries.get(f"{prefix}.state") if compressed else None
        return AttentionMetadata(
            swa,
            part if isinstance(part, CompressedMetadata) else None,
            state if isinstance(state, CompressorMetadata) else None,
        )

    def _refuse_earlier_build(self) -> None:
        """Raise ArgumentError unless the step runs as captured: then the tensors hold what the graph is to read."""
        if not self.as_captured:
            raise ArgumentError(
                "attn_metadata",
                expected="metadata of their builder's last build",
                actual="metadata of an earlier one, whose tensors hold another step by now",
                hint="build the metadata right before the step runs, or give each step in flight a builder of its own",
            )


def _missing(key: str, expected_type: type, entry: object, metadata: Mapping[Any, Any], kind: LayerKind) -> str:
    keys = ", ".join(sorted({_name(key) for key in metadata})) or "none"
    if any(isinstance(key, (LayerKind, tuple)) for key in metadata):
        cure = "name every kind of layer that runs in this step in build_for, or call build_all"
        return f"attn_metadata: expected metadata of {kind.value} layers, got metadata of: {keys} -> {cure}"
    got = "nothing" if entry is None else type(entry).__name__
    return f"attn_metadata[{key!r}]: expected {expected_type.__name__}, got {got} (keys: {keys})"


def _name(key: Any) -> str:  # noqa: ANN401 - of a caller's mapping
    key = f"{_name(key[0])} of ratio {key[1]}" if isinstance(key, tuple) and len(key) == 2 else key
    return key.value if isinstance(key, LayerKind) else str(key)


def _by_kind(metadata: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Metadata by kind of layer, with `LayerKind` for names of kinds; metadata by prefix unchanged."""
    if not isinstance(next(iter(metadata.values()), None), AttentionMetadata):
        return metadata
    kinds = [kind.value for kind in LayerKind]
    by_kind: dict[LayerKey, Any] = {}
    for key, both in metadata.items():
        kind, *ratio = key if isinstance(key, tuple) else (key,)
        if kind not in kinds:
            raise UnknownNameError("layer kind in attn_metadata", str(kind), kinds)
        by_kind[(LayerKind(kind), *ratio) if ratio else LayerKind(kind)] = both
    return by_kind


_context: ContextVar[ForwardContext | None] = ContextVar("dsv4attn_forward", default=None)


@contextmanager
def set_forward_context(
    attn_metadata: Metadata | None,
    *,
    as_captured: bool = False,
    record_entries: Mapping[str, Tensor] | None = None,
    inject_entries: Mapping[str, Tensor] | None = None,
) -> Iterator[ForwardContext]:
    """Run a step: layers called inside find their metadata in `attn_metadata`.

    attn_metadata: what `MetadataBuilder.build_for` or `build_all` returned, by kind of layer. Or a mapping by prefix:
    the `prefix` of each layer to its compressed metadata, its `swa_prefix` to its window metadata, its `prefix` and
    ".state" to that of its compressor. None is the warm-up: layers reserve memory and zero their output.
    as_captured: run the step as a captured graph runs it, for metadata of a capture whose device tensors hold another
    step by now. An indexer then reads no length of the host, which is still that of the capture. Without it an indexer
    may take all entries, up to K, because the host says that no token sees more than K.
    record_entries: for the prefix of a layer that selects, a tensor [>= T, K] int32 on its device, to which the layer
    copies the entries of each token: ascending numbers, then -1. A captured graph writes it in every replay.
    inject_entries: for the prefix of a layer that selects, entries [>= T, K] int32 in that form. The layer takes them,
    and neither scores nor selects. Unless a graph is captured their values are checked, for which the host waits for
    the device. A graph reads them again in every replay.
    Raises ArgumentError for anything else, UnknownNameError for kinds that do not exist.
    """
    if attn_metadata is not None and not isinstance(attn_metadata, Mapping):
        raise ArgumentError(
            "attn_metadata",
            expected="a mapping by kind of layer or by prefix, or None for a warm-up",
            actual=type(attn_metadata).__name__,
            hint="give all that build_for returned, not the metadata of one kind",
        )
    context = ForwardContext(
        None if attn_metadata is None else _by_kind(attn_metadata),
        as_captured,
        _of_layers("record_entries", record_entries),
        _of_layers("inject_entries", inject_entries),
    )
    token = _context.set(context)
    try:
        yield context
        if attn_metadata is not None:
            context.check_entries_used()
    finally:
        _context.reset(token)


def _of_layers(name: str, entries: object) -> Mapping[str, Tensor]:
    """Entries by prefix, none for None. Raises ArgumentError for anything else."""
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        expected = "a mapping of prefixes of layers to tensors, or None"
        raise ArgumentError(name, expected=expected, actual=type(entries).__name__)
    return entries


def runs_as_captured() -> bool:
    """Whether the step being run asks for what a captured graph does. False outside a step."""
    context = _context.get()
    return context is not None and context.as_captured


def get_forward_context() -> ForwardContext:
    """The step being run. Raises NoForwardContextError outside one."""
    context = _context.get()
    if context is None:
        raise NoForwardContextError("no step is being run -> call layers inside `with set_forward_context(metadata):`")
    return context
