"""Protocols of index steps and of metadata extensions, which a backend may implement. Part of the contract.

`torch_ops.index_ops` is the definition of every step, and the default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4attn.core.cache.selected_keys import PageTable

__all__ = [
    "IndexStep",
    "IndexSteps",
    "MetadataExtension",
    "RaggedSteps",
    "RankSteps",
    "prepare_index_step",
]

_P = ParamSpec("_P")
_Window = TypeVar("_Window")
_Compressed = TypeVar("_Compressed")


class IndexStep(Generic[_P]):
    """An index step that can be prepared once and run for every layer of a kind.

    It decorates the function that prepares: checks the arguments, binds all of them but the first, and returns
    `run(first)`, which computes. `first` may be another tensor in each run: of the same signature, with more rows
    behind those it was prepared with. Called, a step prepares and runs at once.
    """

    def __init__(self, prepare: Callable[_P, Callable[[Tensor], None]]) -> None:
        self.prepare = prepare
        self._first = next(iter(signature(prepare).parameters))
        update_wrapper(self, prepare)

    def __call__(self, *args: _P.args, **options: _P.kwargs) -> None:
        """Compute once."""
        first: Any = args[0] if args else options[self._first]
        self.prepare(*args, **options)(first)


def prepare_index_step(
    step: Callable[..., object], first: Tensor, *rest: object, out: tuple[Tensor, Tensor]
) -> Callable[[Tensor], None]:
    """`run(first)` of any step, see `IndexStep`. A plain function is called with all its arguments in each run."""
    if isinstance(step, IndexStep):
        prepared: Callable[[Tensor], None] = step.prepare(first, *rest, out=out)
        return prepared
    rows = first.shape[0]

    def run(first: Tensor) -> None:
        step(first[:rows], *rest, out=out)

    return run


class IndexSteps(Protocol):
    """Index arithmetic that runs once a layer; `torch_ops.index_ops` is the definition and the default."""

    def compute_global_topk_indices_and_lens(
        self,
        topk_indices: Tensor,
        visible_lens: Tensor,
        token_to_req: Tensor,
        block_table: Tensor,
        block_size: int,
        out: tuple[Tensor, Tensor],
    ) -> object:
        """See `core.torch_ops.index_ops`. The result is ignored."""

    def combine_topk_swa_indices(
        self,
        topk_indices: Tensor | None,
        visible_lens: Tensor | None,
        is_valid: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        gather_lens: Tensor,
        window: int,
        topk: int,
        rows: int,
        offset: int,
        out: tuple[Tensor, Tensor],
        *,
        swa: PageTable | None = None,
        compressed: PageTable | None = None,
    ) -> None:
        """Selected entries and windows to rows of a gathered chunk."""

    def build_ragged_indices_from_dense(
        self, indices: Tensor, lens: Tensor, num_slots: int, out: tuple[Tensor, Tensor]
    ) -> None:
        """Dense rows to CSR."""

    def transient_bytes(self, max_elements: int, max_tokens: int) -> int:
        """Upper bound on temporaries of any step over an index matrix of so many elements; 0 for kernels."""


class RankSteps(Protocol):
    """Attention over ranks: what is sent, and the merge. `core.context_parallel.attention` is the definition.

    Letters: R ranks, t tokens of a piece, H heads, D dims. Nothing is allocated. A decode that is one piece is not
    packed: attention writes it where it is sent from.
    """

    def pack_part(self, out: Tensor, lse: Tensor, sent: Tensor, sent_lse: Tensor) -> None:
        """Copy out [t, H, D] and lse [t, H] fp32, of any strides, to contiguous tensors of the same dtypes."""

    def merge_parts(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, attn_sink: Tensor | None) -> None:
        """Write the attention over the keys of all ranks to out [t, H, D] and lse [t, H] fp32, of any strides.

        outs: [R, t, H, D] like out, and lses: [R, t, H] fp32, natural log: contiguous but for the first dimension. They
        are summed in fp32 in the order of ranks, so that all ranks have the same bits. A part of weight zero may hold
        NaN. attn_sink: [H] fp32 or None - applied once, to the whole; lse stays without it.
        """


class RaggedSteps(IndexSteps, Protocol):
    """Index steps with an optional one for backends with ragged indices."""

    def compute_global_topk_ragged_indices_and_indptr(
        self,
        topk_indices: Tensor,
        visible_lens: Tensor,
        token_to_req: Tensor,
        block_table: Tensor,
        block_size: int,
        out: tuple[Tensor, Tensor],
    ) -> None:
        """Local entry numbers to ragged rows of global slots."""


class MetadataExtension(Protocol[_Window, _Compressed]):
    """A backend's own fields of metadata, in buffers that live as long as the builder. Called once a step.

    Generic in the classes of the window's and of the compressed part's metadata, which stand above the contract.
    """

    def extend_swa(self, swa: _Window) -> _Window:
        """Metadata of the windows, in a class of the backend's own."""

    def extend_compressed(self, compressed: _Compressed) -> _Compressed:
        """The same for the compressed part of one kind of layers."""
