"""`TracedBackend`: a backend that writes a line for each call of an op, before the op runs.

`DSV4ATTN_TRACE` asks for it. Selection puts this backend around the chosen one when it is built, so nothing is asked
in a call, and nothing runs where the variable is not set. No value is read from a device.

A line has the op, whose op it is, the layer, the phase, and the arguments: of tensors dtype and shape.

    dsv4attn: select_topk by triton, layer c4a ratio 4 of model.layers.3, decode: query.values=uint8[2, 64, 128] ...
"""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch
from attrs import evolve, fields
from torch import Tensor

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, Backend, EntryIndices, FillRows, Phase, Run
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.info import COMPUTING
from dsv4attn.core.contract.op_names import expanded
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.reprs import layer_text, value_text
from dsv4attn.errors import ConfigError
from dsv4attn.selection.reference_ops import AroundBackend, WatchedIndexOps, WatchedLayerOps, reference_ops_of

_STDERR = "1"
_OF_PREFILL = "dequantize_and_gather_k_cache", "prepare_rows", "combine_topk_swa_indices"
"""Ops that run for prefill tokens only."""


class TracedBackend(AroundBackend):
    """A backend whose calls are written.

    wrapped: the backend that runs.
    target: "1": lines go to stderr. Anything else is the path of a file that lines are appended to.
    Raises ConfigError for a file that cannot be written.
    """

    def __init__(self, wrapped: Backend, target: str) -> None:
        """Put a wrapper around each op."""
        super().__init__(wrapped)
        self._target = target
        self._replaced = frozenset(expanded(reference_ops_of(wrapped)))
        if target != _STDERR:
            _file(target)
        for name in COMPUTING:
            setattr(self, name, self._traced(name, getattr(wrapped, name), is_own=True))
        layer_ops, index_ops = wrapped.layer_ops, wrapped.index_ops

        def layer_op(name: str, op: Any) -> Any:  # noqa: ANN401 - an op
            return self._traced(name, op, is_own=name not in _DEFAULTS or layer_ops.brings(name))

        def index_op(name: str, op: Any) -> Any:  # noqa: ANN401 - an op, or what it prepared
            return self._traced(name, op, is_own=index_ops.brings(name))

        self.layer_ops = WatchedLayerOps.around(layer_ops, layer_op)
        self.index_ops = WatchedIndexOps.around(index_ops, index_op)
        self.builder_ops = self._traced_table(wrapped.builder_ops or BuilderOps(), BuilderOps())
        self.rank_ops = self._traced_table(wrapped.rank_ops, RankOps(), "pack_partial", "merge_partials")
        prepare_rows = wrapped.prepare_rows
        self.prepare_rows = None if prepare_rows is None else self._traced_rows(prepare_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made around a copy of the other backend."""
        return type(self), (self.wrapped, self._target)

    @property
    def _note(self) -> str:
        return "traced"

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `Backend`. Each run of the prepared call writes a line."""
        return self._traced_run(phase, call, self.wrapped.prepare(phase, call))

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """As `prepare`."""
        run = self.wrapped.prepare_entries(call, entries)
        return None if run is None else self._traced_run(Phase.DECODE, call, run)

    def _traced_run(self, phase: Phase, call: AttentionCall, run: Run) -> Run:
        rows = list(_shown("keys", call.keys))

        def traced(tensors: AttentionTensors) -> None:
            self._write(phase.value, [*_shown("", tensors), *rows], layer=call.layer, phase=phase.value)
            run(tensors)

        return traced

    def _traced_rows(self, prepare_rows: Callable[..., FillRows]) -> Callable[..., FillRows]:
        def prepare(*args: Any) -> FillRows:  # noqa: ANN401 - those of `PrepareRows`
            return self._traced("prepare_rows", prepare_rows(*args), is_own=True)  # type: ignore[no-any-return]

        return prepare

    def _traced_table(self, table: Any, torch_table: Any, *names: str) -> Any:  # noqa: ANN401 - two tables of one class
        ops = {name: getattr(table, name) for name in names or [each.name for each in fields(type(torch_table))]}
        own = {name: op is not getattr(torch_table, name) for name, op in ops.items()}
        return evolve(table, **{name: self._traced(name, op, is_own=own[name]) for name, op in ops.items()})

    def _traced(self, name: str, op: Callable[..., Any], *, is_own: bool) -> Any:  # noqa: ANN401 - a function like op
        parameters = _parameters(op)

        def traced(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the op
            if not torch.compiler.is_compiling():
                names = [*parameters[: len(args)], *(f"argument{i}" for i in range(len(parameters), len(args)))]
                values = [*zip(names, args, strict=True), *options.items()]
                phase = Phase.PREFILL.value if name in _OF_PREFILL else ""
                layer = None
                if args and isinstance(args[0], AttentionCall):
                    layer, phase = args[0].layer, name
                shown = (text for key, value in values for text in _shown(key, value))
                self._write(name, shown, layer=layer, phase=phase, is_own=is_own)
            return op(*args, **options)

        return traced

    def _write(
        self, op: str, arguments: Iterable[str], *, layer: LayerGeometry | None, phase: str, is_own: bool = True
    ) -> None:
        """Write one line."""
        source = self.name if is_own and op not in self._replaced else "reference"
        prefix, layer_found, phase_found = _step_of_callers()
        layer, phase = layer or layer_found, phase or phase_found
        where = f"layer {layer_text(layer)}{f' of {prefix}' if prefix else ''}" if layer is not None else "no layer"
        out = sys.stderr if self._target == _STDERR else _file(self._target)
        print(f"dsv4attn: {op} by {source}, {where}, {phase}: {' '.join(arguments)}", file=out, flush=True)


_DEFAULTS = frozenset(expanded(["norms", "compressor", "indexer", "selection", "hyper_connections"])) - {
    "propose_candidates", "choose_candidates",
}  # fmt: skip
"""Layer ops that torch has."""


@cache
def _file(path: str) -> TextIO:
    """The file, open for appending. Several processes may append lines to it."""
    try:
        file = Path(path).expanduser().open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        problem = f"expected 0, 1 or a file that can be written, got {path!r}: {error.strerror}"
        raise ConfigError("environment variable DSV4ATTN_TRACE", problem) from error
    atexit.register(file.close)
    return file


def _parameters(op: Callable[..., Any]) -> list[str]:
    """The names of the arguments that an op takes by position."""
    try:
        parameters = inspect.signature(op).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _shown(name: str, value: object) -> Iterator[str]:
    """`name=text` of an argument: of a struct its fields, of a cache its layout and sizes. What is None is left out."""
    if isinstance(value, Tensor):
        yield f"{name}={value_text(value)}"
    elif isinstance(value, PagedKVCache):
        yield f"{name}={value.layout.name}[{value.num_blocks} pages of {value.block_size}]"
    elif isinstance(value, KVCacheLayout):
        yield f"{name}={value.name}"
    elif isinstance(value, LayerGeometry):
        yield f"{name}={layer_text(value).replace(' ', '_')}"
    elif isinstance(value, Enum):
        yield f"{name}={value.value}"
    elif isinstance(value, bool | int | float | str | torch.dtype):
        yield f"{name}={value}"
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        for i, item in enumerate(value):
            yield from _shown(f"{name}.{i}", item)
    else:
        attributes = [each.name for each in getattr(type(value), "__attrs_attrs__", ())]
        for attribute in attributes or [*getattr(value, "_fields", ())]:
            field_name = f"{name}.{attribute}" if name else attribute
            yield from _shown(field_name, getattr(value, attribute))


def _step_of_callers() -> tuple[str, LayerGeometry | None, str]:
    """(prefix of the layer, its geometry, phases of the step), as the functions that led to this one know them.

    An op's arguments do not say them. A caller that is a layer, or `forward_mqa`, does.
    """
    prefix, layer, phase = "", None, ""
    call_layer: LayerGeometry | None = None
    frame = inspect.currentframe()
    while frame is not None and not (layer is not None and phase):
        values = frame.f_locals
        bound, call, metadata = values.get("bound", values.get("self")), values.get("call"), values.get("metadata")
        if layer is None and isinstance(bound, DeepseekV4MLAAttention):
            prefix, layer = bound.prefix, bound.geometry
        elif layer is None and isinstance(bound, DeepseekV4Attention) and hasattr(bound, "layer"):
            prefix, layer = bound.prefix, bound.layer
        if isinstance(call, ForwardCall):
            metadata = call.metadata
            call_layer = call.layer
        if not phase and isinstance(metadata, AttentionMetadata):
            counts = {"decode": metadata.swa.num_decode_tokens, "prefill": metadata.swa.num_prefill_tokens}
            phase = " and ".join(name for name, count in counts.items() if count)
        frame = frame.f_back
    return prefix, layer or call_layer, phase or "no phase"
