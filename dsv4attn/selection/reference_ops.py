"""`ReferenceOpsBackend`: a backend some of whose ops are the reference's, to find which op makes wrong numbers.

`DSV4ATTN_REFERENCE_OPS` names the ops. Selection puts this backend around the chosen one when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from attrs import evolve, field, fields, frozen
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, Backend, ChunkCost, EntryIndices, Phase, Run
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.index_ops import IndexOp, IndexOps
from dsv4attn.core.contract.info import COMPUTING
from dsv4attn.core.contract.layer_ops import LayerOps, default_layer_ops
from dsv4attn.core.contract.op_names import GROUPS, expanded
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.contract.wrapped import WrappedBackend
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.reprs import one_line
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.errors import Dsv4AttnError

_VARIABLE = "DSV4ATTN_REFERENCE_OPS"
_TRANSLATION = "compute_global_topk_indices_and_lens"
_OF_ROWS = {"dequantize_and_gather_k_cache", "prepare_rows", "combine_topk_swa_indices"} | {
    "build_ragged_indices_from_dense"
}
"""Ops that `Backend.prepare_rows` computes at once: without it core calls them one by one."""


@frozen
class WatchedLayerOps(LayerOps):
    """Layer ops in wrappers. plain: the same ops without the wrappers, which say who brings an op."""

    plain: LayerOps = field(factory=LayerOps)

    def brings(self, name: str) -> bool:
        """See `LayerOps.brings`."""
        return self.plain.brings(name)

    @classmethod
    def around(cls, plain: LayerOps, wrap: Callable[[str, Any], Any]) -> WatchedLayerOps:
        """`wrap(name, op)` of each op, and the other fields as they are."""
        ops = {op for group in (*_LAYER_GROUPS, "products") for op in GROUPS[group]}
        values = {each.name: getattr(plain, each.name) for each in fields(LayerOps)}
        changed = {name: wrap(name, op) for name, op in values.items() if name in ops and op is not None}
        return cls(**{**values, **changed}, plain=plain)


_LAYER_GROUPS = "norms", "compressor", "indexer", "selection", "hyper_connections"


@frozen
class WatchedIndexOps(IndexOps):
    """Index ops in wrappers. plain: the same ops without the wrappers, which say who brings an op."""

    plain: IndexOps = field(factory=IndexOps)

    def brings(self, name: str) -> bool:
        """See `IndexOps.brings`."""
        return self.plain.brings(name)

    @classmethod
    def around(cls, plain: IndexOps, wrap: Callable[[str, Any], Any]) -> WatchedIndexOps:
        """`wrap(name, function)` of each op, also of what a prepared op runs, and the other fields as they are."""
        values = {each.name: getattr(plain, each.name) for each in fields(IndexOps)}
        ops = {name: values[name] for name in GROUPS["index_ops"] if values[name] is not None}
        changed = {name: IndexOp(wrap(name, op.compute), _prepares(name, op, wrap)) for name, op in ops.items()}
        return cls(**{**values, **changed}, plain=plain)


def _prepares(name: str, op: IndexOp, wrap: Callable[[str, Any], Any]) -> Callable[..., Any]:
    def prepare(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the op
        return wrap(name, op.prepare(*args, **options))

    return prepare


class AroundBackend(WrappedBackend):
    """A backend around another one. Methods that only the other class has are the other's."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made around a copy of the other backend."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of another class
        if name.startswith("__") or "wrapped" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wrapped, name)

    @one_line
    def __repr__(self) -> Sequence[str]:
        """The other backend, and what is done with it."""
        return repr(self.wrapped), self._note

    @property
    def _note(self) -> str:
        raise NotImplementedError


class ReferenceOpsBackend(AroundBackend):
    """A backend some of whose ops are the reference's.

    wrapped: the backend whose other ops run.
    reference: the reference backend, deterministic if `wrapped` is.
    names: names of groups and ops, see `op_names.GROUPS`.

    Ops of the reference read lengths on the host. Each raises Dsv4AttnError while a graph is captured.
    """

    def __init__(self, wrapped: Backend, reference: Backend, names: Sequence[str]) -> None:
        """Replace the ops."""
        super().__init__(wrapped)
        self.reference, self.reference_ops = reference, tuple(names)
        self._ops = ops = frozenset(expanded(names))
        for name in COMPUTING & ops:
            setattr(self, name, _eager(name, getattr(reference, name)))
        if "inv_rope_o_proj" in ops:
            self.projects_fp8 = False
        self.phases_agree = wrapped.phases_agree and len(ops & {"decode", "prefill"}) != 1
        self.layer_ops = self._replaced_layer_ops(wrapped.layer_ops)
        self.index_ops = self._replaced_index_ops(wrapped.index_ops)
        if wrapped.builder_ops is not None:
            self.builder_ops = self._replaced(wrapped.builder_ops, BuilderOps())
        self.rank_ops = self._replaced(wrapped.rank_ops, RankOps())
        if ops & _OF_ROWS:
            self.prepare_rows = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made around copies of both backends."""
        return type(self), (self.wrapped, self.reference, self.reference_ops)

    @property
    def _note(self) -> str:
        return f"by the reference: {' '.join(self.reference_ops)}"

    def _replaced(self, table: Any, torch_table: Any) -> Any:  # noqa: ANN401 - two tables of one class
        """A table with the ops of torch's that are named."""
        names = [each.name for each in fields(type(torch_table)) if each.name in self._ops]
        return evolve(table, **{name: _eager(name, getattr(torch_table, name)) for name in names})

    def _replaced_layer_ops(self, table: LayerOps) -> LayerOps:
        if "linear" in self._ops:
            table = evolve(table, coded=None)
        torch_ops = default_layer_ops(deterministic=self.wrapped.deterministic)
        names = [each.name for each in fields(LayerOps) if each.name in self._ops]
        if not names:
            return table
        own_bytes, torch_bytes = table.transient_bytes, torch_ops.transient_bytes
        plain = evolve(
            table,
            **{name: getattr(torch_ops, name) for name in names},
            transient_bytes=lambda max_tokens: max(own_bytes(max_tokens), torch_bytes(max_tokens)),
        )
        if plain.propose_candidates is None or plain.choose_candidates is None:
            plain = evolve(plain, most_over_ranks=0)
        return WatchedLayerOps.around(plain, lambda name, op: _eager(name, op) if name in self._ops else op)

    def _replaced_index_ops(self, table: IndexOps) -> IndexOps:
        torch_ops, own_bytes = IndexOps(), table.transient_bytes
        names = [each.name for each in fields(IndexOps) if each.name in self._ops]
        if not names:
            return table

        def transient_bytes(max_elements: int, max_tokens: int) -> int:
            return max(own_bytes(max_elements, max_tokens), torch_ops.transient_bytes(max_elements, max_tokens))

        replaced: dict[str, Any] = {name: getattr(torch_ops, name) for name in names}
        if _TRANSLATION in names:
            # it translates to ragged rows at once, where core else translates and packs
            replaced["compute_global_topk_ragged_indices_and_indptr"] = None
        plain = evolve(table, **replaced, transient_bytes=transient_bytes)
        return WatchedIndexOps.around(plain, lambda name, op: _eager(name, op) if name in self._ops else op)

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """The larger bound of both backends."""
        backends = (self.wrapped, self.reference) if self._ops & COMPUTING else (self.wrapped,)
        return max(backend.transient_bytes(layer, max_tokens, max_width, max_rows) for backend in backends)

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `Backend`. A phase of the reference is not prepared: each run computes the whole call."""
        return Backend.prepare(self, phase, call) if phase.value in self._ops else self.wrapped.prepare(phase, call)

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """See `Backend`. None where decode, or the translation of entries to slots, is the reference's."""
        return None if self._ops & {"decode", _TRANSLATION} else self.wrapped.prepare_entries(call, entries)

    def takes_raw_q(self, layer: LayerGeometry, q: Tensor, row_dtype: Any, chunks: Sequence[ChunkCost]) -> bool:  # noqa: ANN401 - of torch
        """See `Backend`. False where the reference prepares q, or attends in prefill."""
        if self._ops & {"prefill", "qnorm_rope_kv_insert"}:
            return False
        return self.wrapped.takes_raw_q(layer, q, row_dtype, chunks)


def reference_ops_of(backend: Backend) -> tuple[str, ...]:
    """The names, of groups and ops, that `DSV4ATTN_REFERENCE_OPS` sends to the reference in a backend."""
    if isinstance(backend, ReferenceOpsBackend):
        return backend.reference_ops
    if isinstance(backend, WrappedBackend):
        return reference_ops_of(backend.wrapped)
    if isinstance(backend, PhasedBackend):
        return tuple(dict.fromkeys(name for phase in Phase for name in reference_ops_of(backend.of(phase))))
    return ()


def _eager(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, which raises while a graph is captured."""

    @wraps(op)
    def run(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the op
        device = next(filter(None, map(_device, (*args, *options.values()))), None)
        if device is not None and is_capturing(device):
            cure = f"run eagerly, or take {name} out of the variable"
            raise Dsv4AttnError(
                f"{name} is captured in a graph, and {_VARIABLE} sends it to the reference, which reads values on the "
                f"host -> {cure}"
            )
        return op(*args, **options)

    return run


def _device(value: object) -> Any:  # noqa: ANN401 - a torch.device, or None
    """Where an argument lies; None for an argument without a tensor."""
    if isinstance(value, AttentionCall | AttentionTensors):
        return value.q.device
    return value.device if isinstance(value, Tensor | PagedKVCache) else None
