"""Metadata of the ROCm backend: what decode attends to, in ragged form as well, made once a step.

Buffers are allocated once, for the largest batch. What a step hands out are views of them whose addresses and lengths
follow from the number of rows alone, never from how many entries rows have: a captured graph finds them again.
"""

from __future__ import annotations

import torch
from attrs import asdict, define
from torch import Tensor

from dsv4attn.backends._triton.index_ops.ragged import build_ragged_indices_from_dense
from dsv4attn.core.cache.selected_keys import DenseIndices, RaggedIndices
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import c128a_columns
from dsv4attn.core.metadata.metadata import CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.reprs import fields_repr
from dsv4attn.core.tensorspec import tensor
from dsv4attn.errors import ArgumentError

_ANY_SLOT = 2**31
"""The builder need not know how large a cache is: attention knows it, and skips slots past its end."""


@define(kw_only=True, eq=False)
class RaggedWindowMetadata(WindowMetadata):
    """Window part of a batch, with the decode windows in ragged form."""

    decode_swa_ragged_indices: Tensor = tensor("_", torch.int32)
    """Slots of all windows, one after another; undefined from `decode_swa_ragged_indptr[-1]` on."""
    decode_swa_ragged_indptr: Tensor = tensor("Td+1", torch.int32)

    __repr__ = fields_repr

    @property
    def decode_swa_ragged(self) -> RaggedIndices:
        """The decode windows."""
        width = self.decode_swa_indices.shape[2]
        return RaggedIndices(self.decode_swa_ragged_indices, self.decode_swa_ragged_indptr, width)


@define(kw_only=True, eq=False)
class RaggedCompressedMetadata(CompressedMetadata):
    """Compressed part of a batch, with the C128A table of decode in ragged form; None for other kinds of layers."""

    c128a_decode_topk_ragged_indices: Tensor | None = tensor("_", torch.int32, optional=True)
    c128a_decode_topk_ragged_indptr: Tensor | None = tensor("Td+1", torch.int32, optional=True)

    __repr__ = fields_repr

    @property
    def c128a_decode_ragged(self) -> RaggedIndices | None:
        """The entries of decode tokens."""
        flat, indptr, dense = (
            self.c128a_decode_topk_ragged_indices,
            self.c128a_decode_topk_ragged_indptr,
            self.c128a_global_decode_topk_indices,
        )
        return None if flat is None or indptr is None or dense is None else RaggedIndices(flat, indptr, dense.shape[2])


class RaggedBuffers:
    """Memory for the ragged form of up to `rows` rows of up to `width` entries."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        """Allocate."""
        self._width = width
        with torch.inference_mode(False):  # later steps may write them outside inference mode
            self._flat = torch.full((max(rows * width, 1),), -1, dtype=torch.int32, device=device)
            self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)

    def fill(self, dense: DenseIndices) -> tuple[Tensor, Tensor]:
        """Write rows; (indices [max(rows * width, 1)], indptr [rows + 1]), the same memory for as many rows.

        Raises ArgumentError, before anything is written, for more or wider rows than there is memory for.
        """
        rows = dense.lens.shape[0]
        if dense.width > self._width or rows >= self._indptr.shape[0]:
            expected = f"at most {self._indptr.shape[0] - 1} rows of {self._width} columns"
            hint = "raise Limits of the builder: decode_window_columns, or max_num_reqs"
            raise ArgumentError("decode rows", expected=expected, actual=[rows, dense.width], hint=hint)
        flat, indptr = self._flat[: max(rows * self._width, 1)], self._indptr[: rows + 1]
        build_ragged_indices_from_dense(dense.indices, dense.lens, _ANY_SLOT, out=(flat, indptr))
        return flat, indptr


class RocmMetadata:
    """See `contract.MetadataExtension`."""

    def __init__(self, geometry: ModelGeometry, limits: Limits, device: torch.device) -> None:
        """Allocate the buffers for every batch within the limits."""
        rows = limits.max_decode_tokens
        self._window = RaggedBuffers(rows, max(geometry.window, limits.decode_window_columns), device)
        self._c128a: RaggedBuffers | None = None
        if LayerKind.HCA in geometry.kinds:
            self._c128a = RaggedBuffers(rows, c128a_columns(geometry, limits), device)

    def extend_swa(self, swa: WindowMetadata) -> RaggedWindowMetadata:
        """Add the ragged decode windows."""
        flat, indptr = self._window.fill(DenseIndices(swa.decode_swa_indices[:, 0], swa.decode_swa_lens))
        return RaggedWindowMetadata(
            **asdict(swa, recurse=False), decode_swa_ragged_indices=flat, decode_swa_ragged_indptr=indptr
        )

    def extend_compressed(self, compressed: CompressedMetadata) -> RaggedCompressedMetadata:
        """Add the ragged C128A rows."""
        slots, lens = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
        flat: Tensor | None = None
        indptr: Tensor | None = None
        if self._c128a is not None and slots is not None and lens is not None:
            flat, indptr = self._c128a.fill(DenseIndices(slots[:, 0], lens))
        return RaggedCompressedMetadata(
            **asdict(compressed, recurse=False),
            c128a_decode_topk_ragged_indices=flat,
            c128a_decode_topk_ragged_indptr=indptr,
        )
