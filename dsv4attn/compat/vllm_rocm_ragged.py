"""vLLM's functions of ragged index lists on AMD GPUs: flat indices, and indptr, the start of each row.

No function reads a length on the host: memory is allocated from shapes, and entries after indptr[-1] are undefined.
An absent entry never becomes a neighbour's row, and no present entry is lost because others are absent.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dsv4attn.compat.arguments import as_rows, check_at_least, check_numbers, check_optional
from dsv4attn.compat.direct import device_backend
from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.attention.overlap import check_results_apart
from dsv4attn.core.cache.selected_keys import ChunkTokens
from dsv4attn.core.memory.plan import ragged_specs
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.core.torch_ops.index_ops import positions_of, token_to_req_indices
from dsv4attn.errors import ArgumentError

__all__ = [
    "build_ragged_indices_from_dense",
    "check_indptr",
    "combine_topk_swa_indices_ragged",
    "compute_global_topk_ragged_indices_and_indptr",
    "copy_ragged_to_graph_buffers",
    "new_rows",
]

INT = torch.int32
INT32_MAX, ANY_SLOT = 2**31 - 1, 2**31
_backend = partial(device_backend, "rocm")


def build_ragged_indices_from_dense(indices: Tensor, lengths: Tensor, num_rows: int = -1) -> tuple[Tensor, Tensor]:
    """Dense rows as (flat [T * K], indptr [T + 1]): the first `lengths` columns of each, absent ones as -1.

    indices: [T, K] int32. lengths: [T] int32. num_rows: number of rows of keys, to which entries may point; -1 if not
    given. Entries of `flat` at or after indptr[-1] are undefined. Raises ArgumentError before any launch.
    """
    letters: dict[str, int] = {}
    check_tensor("indices", indices, "T K", INT, letters)
    check_tensor("lengths", lengths, "T", INT, letters)
    check_same_device(indices, lengths=lengths)
    flat, indptr = new_rows(indices, *indices.shape)
    num_slots = ANY_SLOT if num_rows < 0 else num_rows
    _backend().index_ops.build_ragged_indices_from_dense(indices, lengths, num_slots, out=(flat, indptr))
    return flat, indptr


def compute_global_topk_ragged_indices_and_indptr(
    topk_indices: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid: Tensor,
    visible_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Entry numbers of requests as ragged slots: (flat [T * K], indptr [T + 1], lens [T]).

    topk_indices: [T, 1, K] or [T, K] int32; -1 or any absent number is allowed at any position. token_to_req: [>= T]
    int32. block_table: [R, N] int32. is_valid: [>= T] bool; other rows are empty. visible_lens: [T] int32, beyond the
    original: number of entries that each token may see; its row has min(visible_lens, K) places. Without it, a row has
    as many places as topk_indices has entries of the table, numbers in [0, N * block_size), for its token.
    A row's slots are contiguous at its front; the rest of its length is -1.
    block_size: entries of a page.
    Raises ArgumentError before any launch.
    """
    rows, letters = as_rows(topk_indices), dict[str, int]()
    check_tensor("topk_indices", rows, "T K", INT, letters)
    check_tensor("block_table", block_table, "_ _", INT, {})
    assert rows is not None
    tokens, width = rows.shape
    for name, tensor, dtype in (("token_to_req", token_to_req, INT), ("is_valid", is_valid, torch.bool)):
        check_tensor(name, tensor, "_", dtype, {})
        check_at_least(name, tensor, tokens, "elements, one for each token")
    check_optional("visible_lens", visible_lens, "T", INT, letters)
    check_numbers(1, block_size=block_size)
    optional = {"visible_lens": visible_lens}
    check_same_device(rows, token_to_req=token_to_req, block_table=block_table, is_valid=is_valid, **optional)
    capacity = min(block_table.shape[1] * block_size, INT32_MAX)
    if visible_lens is None:
        seen = is_valid[:tokens].to(INT) * capacity
        lens = ((rows >= 0) & (rows < seen[:, None])).sum(1, dtype=INT)
    else:
        seen = is_valid[:tokens].to(INT) * visible_lens.clamp(0, capacity)
        lens = seen.clamp(max=width)
    flat, indptr = new_rows(rows, tokens, width)
    translate = _backend().index_ops.compute_global_topk_ragged_indices_and_indptr
    assert translate is not None
    translate(rows, seen, token_to_req[:tokens], block_table, block_size, out=(flat, indptr), row_lens=lens)
    return flat, indptr, lens


def combine_topk_swa_indices_ragged(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,  # noqa: N803 - vLLM's letters
    N: int,  # noqa: N803
) -> tuple[Tensor, Tensor, Tensor]:
    """Selected entries, then the window, of each token of a chunk as ragged rows of the gathered keys.

    topk_indices: [t, >= topk] int32 entry numbers; with topk 0 only its rows count. query_start_loc: [n + 1] int32 of
    any base. seq_lens, gather_lens: [n] int32. M: rows of each request. N: its first window row.
    window_size: most window keys of a token.
    compress_ratio: tokens of an entry.
    topk: columns of topk_indices that count.
    Returns (flat [t * (topk + window_size)], indptr [t + 1], lens [t]). Raises ArgumentError before any launch.
    """
    letters: dict[str, int] = {}
    check_tensor("topk_indices", topk_indices, "t _", INT, letters)
    check_tensor("seq_lens", seq_lens, "n", INT, letters)
    check_tensor("gather_lens", gather_lens, "n", INT, letters)
    check_tensor("query_start_loc", query_start_loc, "n+1", INT, letters)
    check_same_device(topk_indices, query_start_loc=query_start_loc, seq_lens=seq_lens, gather_lens=gather_lens)
    check_numbers(1, window_size=window_size, compress_ratio=compress_ratio)
    check_numbers(0, topk=topk)
    if topk > topk_indices.shape[1]:
        raise ArgumentError(
            "topk", expected=f"at most the {topk_indices.shape[1]} columns of topk_indices", actual=topk
        )
    if letters["t"] and not letters["n"]:
        raise ArgumentError("topk_indices", expected="no rows where there are no requests", actual=letters["t"])
    tokens = topk_indices.shape[0]
    starts = query_start_loc - query_start_loc[:1]
    valid = torch.ones(tokens, dtype=torch.bool, device=starts.device)
    seen = None
    if topk:
        request = token_to_req_indices(starts, tokens)
        seen = ((positions_of(starts, seq_lens, request) + 1) // compress_ratio).to(INT)
    dense = torch.empty(tokens, topk + window_size, dtype=INT, device=starts.device)
    lens = torch.empty(tokens, dtype=INT, device=starts.device)
    chunk = ChunkTokens(
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        query_start_loc=starts,
        visible_lens=seen,
        is_valid=valid,
        window=window_size,
        topk=topk,
        rows=M,
        offset=N,
    )
    _backend().index_ops.combine_topk_swa_indices(topk_indices if topk else None, chunk, out=(dense, lens))
    flat, indptr = new_rows(dense, *dense.shape)
    _backend().index_ops.build_ragged_indices_from_dense(dense, lens, ANY_SLOT, out=(flat, indptr))
    return flat, indptr, lens


def copy_ragged_to_graph_buffers(
    ragged_indices: Tensor,
    ragged_indptr: Tensor,
    indices_buffer: Tensor,
    indptr_buffer: Tensor,
    num_rows: int,
    max_entries_per_row: int,
) -> tuple[Tensor, Tensor]:
    """Copy ragged rows to the buffers that a captured graph reads; returns the views for the capture.

    ragged_indices: [capacity] int32. ragged_indptr: [num_rows + 1] int32. indices_buffer: [>= num_rows *
    max_entries_per_row, and >= capacity] int32. indptr_buffer: [>= num_rows + 1] int32.
    num_rows: rows of the list.
    max_entries_per_row: most slots of a row.
    Returns (indices [max(num_rows * max_entries_per_row, 1)], indptr [num_rows + 1]), whose addresses and sizes depend
    on num_rows alone. Raises ArgumentError before anything is copied.
    """
    check_numbers(0, num_rows=num_rows, max_entries_per_row=max_entries_per_row)
    check_tensor("ragged_indptr", ragged_indptr, "T+1", INT, {"T": num_rows})
    places = max(num_rows * max_entries_per_row, 1)
    lists = {"ragged_indices": ragged_indices, "indices_buffer": indices_buffer, "indptr_buffer": indptr_buffer}
    for name, tensor in lists.items():
        check_tensor(name, tensor, "_", INT, {})
    check_at_least("indices_buffer", indices_buffer, max(places, ragged_indices.shape[0]))
    check_at_least("indptr_buffer", indptr_buffer, num_rows + 1)
    check_same_device(ragged_indices, ragged_indptr=ragged_indptr)
    check_same_device(indices_buffer, indptr_buffer=indptr_buffer)
    check_indptr("ragged_indptr", ragged_indptr, ragged_indices.shape[0])
    buffers = {"indices_buffer": indices_buffer, "indptr_buffer": indptr_buffer}
    check_results_apart(buffers, ragged_indices=ragged_indices, ragged_indptr=ragged_indptr)
    if ragged_indices.shape[0]:
        indices_buffer[: ragged_indices.shape[0]].copy_(ragged_indices, non_blocking=True)
    indptr_buffer[: num_rows + 1].copy_(ragged_indptr, non_blocking=True)
    return indices_buffer[:places], indptr_buffer[: num_rows + 1]


# shared by these functions


def check_indptr(name: str, indptr: Tensor, capacity: int) -> None:
    """Check the starts of rows, if that needs no synchronisation with a device.

    name: name of the argument in the error.
    indptr: [rows + 1] int32 start of each row.
    capacity: number of elements of the ragged list.
    """
    if indptr.device.type != "cpu":
        return
    values = indptr.tolist()
    if values[0] != 0:
        raise ArgumentError(f"{name}[0]", expected="0, where the first row begins", actual=values[0])
    for i, (begin, end) in enumerate(pairwise(values)):
        if end < begin:
            raise ArgumentError(f"{name}[{i + 1}]", expected=f"at least {begin}, where row {i} begins", actual=end)
    if values[-1] > capacity:
        raise ArgumentError(f"{name}[{len(values) - 1}]", expected=f"at most the {capacity} indices", actual=values[-1])


def new_rows(like: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Memory of a ragged list of `rows` rows of at most `width` entries.

    like: a tensor on the device of the list.
    rows: number of rows.
    width: most elements of a row.
    """
    if rows * width > INT32_MAX:
        raise ArgumentError("indices", expected="fewer than 2^31 in all", actual=f"{rows} rows of {width}")
    flat, indptr = (like.new_empty(shape, dtype=dtype) for shape, dtype in ragged_specs(rows, width))
    return flat, indptr
