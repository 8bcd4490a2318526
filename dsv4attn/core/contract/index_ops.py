"""`IndexOps`: index arithmetic that runs once a layer, one field an op. Part of the contract.

`torch_ops.index_ops` has the definition of every op, which is the default of its field and says what the op computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any, TypeAlias

from attrs import field, frozen
from attrs.converters import optional
from torch import Tensor

from dsv4attn.core.torch_ops import index_ops

__all__ = ["IndexOp", "IndexOps", "index_op", "prepared_op"]

Run: TypeAlias = Callable[[Any], None]
"""A prepared index op: `run(first)` computes it for the first argument of one layer."""


@frozen
class IndexOp:
    """An index op that runs once, or is prepared once and runs for every layer of a kind. `index_op` makes it.

    compute: `compute(first, ..., out=...)` computes at once.
    prepare: `prepare(first, ..., out=...)` checks the arguments, binds all of them but the first, and returns
       `run(first)`. `first` may be another tensor in each run: of the same signature, with more rows after those it was
       prepared with.
    """

    # an op that was pickled computes by another function around the same `prepare`
    compute: Callable[..., object] = field(eq=lambda compute: getattr(compute, "__wrapped__", compute))
    prepare: Callable[..., Run] = field(eq=False, repr=False)

    def __call__(self, *args: object, **options: object) -> None:
        """Compute once."""
        self.compute(*args, **options)

    def __reduce__(self) -> tuple[object, ...]:
        """How an op is pickled: by the name under which its module has it, as a function is, or by its function."""
        name = f"{getattr(self.compute, '__module__', '')}:{getattr(self.compute, '__qualname__', '')}"
        with suppress(ImportError, AttributeError, ValueError):
            if resolve_name(name) is self:
                return resolve_name, (name,)
        is_plain = isinstance(self.prepare, partial) and self.prepare.func is _bind
        return (index_op, (self.compute,)) if is_plain else (prepared_op, (self.prepare,))


def index_op(op: Callable[..., object]) -> IndexOp:
    """A plain function as an op: a prepared one calls the function with all arguments in each run."""
    return op if isinstance(op, IndexOp) else IndexOp(op, partial(_bind, op))


def prepared_op(prepare: Callable[..., Run]) -> IndexOp:
    """Decorate the `prepare` of an op, which then computes by preparing and running once."""

    @wraps(prepare)
    def compute(first: Tensor | None, /, *rest: object, **options: object) -> None:
        prepare(first, *rest, **options)(first)

    return IndexOp(compute, prepare)


def _bind(op: Callable[..., object], first: Tensor | None, *rest: object, **options: object) -> Run:
    rows = 0 if first is None else first.shape[0]

    def run(first: Tensor | None) -> None:
        op(first if first is None or first.shape[0] == rows else first[:rows], *rest, **options)

    return run


@frozen
class IndexOps:
    """Index arithmetic that runs once a layer. The default of each op is torch's definition.

    A backend that brings an op has `evolve(IndexOps(), combine_topk_swa_indices=f)` as its `index_ops`, with a plain
    function or with an op that `prepared_op` made. Arguments are those of the definitions; results are ignored.

    compute_global_topk_indices_and_lens: entry numbers of requests to slots. combine_topk_swa_indices: entries and
       windows to rows of a gathered chunk. build_ragged_indices_from_dense: dense rows to CSR.
    compute_global_topk_ragged_indices_and_indptr: entry numbers to ragged rows of slots; None: core translates to dense
       rows, and packs these.
    transient_bytes: `transient_bytes(max_elements, max_tokens)`, an upper bound on temporaries of the framework's
       allocator in any one op over an index matrix with at most that many elements; 0 for kernels.
    """

    compute_global_topk_indices_and_lens: IndexOp = field(
        default=index_op(index_ops.compute_global_topk_indices_and_lens), converter=index_op
    )
    combine_topk_swa_indices: IndexOp = field(default=index_op(index_ops.combine_topk_swa_indices), converter=index_op)
    build_ragged_indices_from_dense: IndexOp = field(
        default=index_op(index_ops.build_ragged_indices_from_dense), converter=index_op
    )
    compute_global_topk_ragged_indices_and_indptr: IndexOp | None = field(default=None, converter=optional(index_op))
    transient_bytes: Callable[[int, int], int] = index_ops.transient_bytes

    def brings(self, name: str) -> bool:
        """Whether the op of this name is another than torch's.

        name: a field of this table.
        """
        return bool(getattr(self, name) != getattr(_TORCH, name))


_TORCH = IndexOps()
