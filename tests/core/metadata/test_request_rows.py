"""Which rows of a decode share keys: what the builder promises, what a backend gets, and what the check refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, fields
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.selected_keys import DenseIndices, RequestRows
from dsv4attn.core.contract.backend import AttentionCall, EntryIndices, Phase, Run
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.metadata import AttentionMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.request_rows import check_request_rows
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.kit.random_step import StepFixture
from tests.core.metadata.test_metadata import builder
from tests.harness import BUILDER_OPS, C4A, C128A, I32, SWA, all_builder_ops, batch_of

LIMITS = Limits(max_num_reqs=6, max_num_batched_tokens=64, max_model_len=256, num_speculative_tokens=4)


def groups_of(request_rows: RequestRows, window_lens: Tensor, size: int) -> list[list[int]]:
    """Groups of rows after each other of one request, at most `size` of them. Every row is in one group.

    Kernels that share keys compute a group together. A group ends before a multiple of `size` rows of its request, by
    `query_start_loc`, and where rows without a window and with one meet. A row of no request, or of a request that
    `query_start_loc` lacks, is by itself.

    request_rows: rows of a call.
    window_lens: [T] int32 - columns of the window of each row.
    size: a power of two.
    """
    requests, starts = request_rows.token_to_req.tolist(), request_rows.query_start_loc.tolist()
    groups, before = list[list[int]](), None
    for row, (request, length) in enumerate(zip(requests, window_lens.tolist(), strict=True)):
        known = 0 <= request < len(starts) - 1
        key = (request, length > 0, (row - starts[request]) // size) if known else (row,)
        if key == before:
            groups[-1].append(row)
        else:
            groups.append([row])
        before = key
    return groups


def rows_of(metadata: AttentionMetadata) -> tuple[RequestRows, DenseIndices, DenseIndices]:
    """What rows share, their windows and their entries."""
    swa, compressed = metadata.swa, metadata.compressed
    assert swa.decode_requests is not None
    assert compressed is not None
    assert compressed.decode_requests is swa.decode_requests
    slots, lens = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
    assert slots is not None
    assert lens is not None
    window = DenseIndices(swa.decode_swa_indices[:, 0], swa.decode_swa_lens)
    return swa.decode_requests, window, DenseIndices(slots[:, 0], lens)


@all_builder_ops
def test_rows_that_the_builder_lists_share_keys_as_it_promises(builder_ops: str) -> None:
    """Ragged drafts, an entry that is completed inside a step, tokens that are not real, and the window's first one."""
    batch = batch_of([3, 5, 4, 0, 1, 9], [3, 130, 34, 0, 40, 9])
    batch.slot_mapping[[4, 7]] = -1  # a token in the middle of a request, and its last one
    rows, window, entries = rows_of(
        builder(LIMITS, builder_ops=BUILDER_OPS[builder_ops]).build_for(batch, [C128A])[C128A]
    )

    check_request_rows(rows, window, entries)

    assert rows.max_tokens == 5
    assert rows.are_several
    assert rows.token_to_req.tolist() == [0, 0, 0, 1, -1, 1, 1, -1, 2, 2, 2, 2, 4]
    assert rows.query_start_loc.tolist() == [0, 3, 8, 12, 12, 13]
    assert [len(set(entries.lens[part].tolist())) for part in ([0, 1, 2], [3, 5, 6], [8, 9, 10, 11])] == [1, 2, 2]
    assert groups_of(rows, window.lens, 4) == [[0, 1, 2], [3], [4], [5, 6], [7], [8, 9, 10, 11], [12]]
    assert groups_of(rows, window.lens, 2) == [[0, 1], [2], [3], [4], [5, 6], [7], [8, 9], [10, 11], [12]]


@all_builder_ops
def test_windows_of_replayed_requests_share_keys_too(builder_ops: str) -> None:
    bounds = torch.tensor([18, 0], dtype=I32)
    swa = builder(LIMITS, builder_ops=BUILDER_OPS[builder_ops]).build(batch_of([4, 3], [22, 9], replay_start=bounds))

    assert swa.decode_requests is not None
    assert swa.decode_swa_lens.tolist() == [1, 2, 3, 4, 7, 8, 8]
    check_request_rows(swa.decode_requests, DenseIndices(swa.decode_swa_indices[:, 0], swa.decode_swa_lens))


def test_nothing_is_promised_without_drafts_or_of_a_block_whose_tokens_see_each_other() -> None:
    block = evolve(LIMITS, decode_window_columns=16)
    for limits, causal in ((evolve(LIMITS, num_speculative_tokens=0), True), (block, False)):
        batch = batch_of([1, 1] if causal else [3, 3], [30, 40], causal=causal)
        metadata = builder(limits).build_for(batch, [C128A])[C128A]
        assert metadata.swa.decode_requests is None
        assert metadata.compressed is not None
        assert metadata.compressed.decode_requests is None
    assert not RequestRows(torch.arange(3, dtype=I32), torch.arange(4, dtype=I32), 5).are_several


BROKEN: dict[str, tuple[str, Callable[[DenseIndices], object]]] = {
    "a window in another order": ("window", lambda rows: rows.indices[1].copy_(rows.indices[1].flip(0))),
    "a later window that lags": ("window", lambda rows: rows.indices[1].copy_(rows.indices[0].clone())),
    "a later window that begins earlier": ("window", lambda rows: rows.lens[:1].fill_(2)),
    "another request's entries": ("entries", lambda rows: rows.indices[1].add_(7)),
    "fewer entries later": ("entries", lambda rows: rows.lens[2:3].fill_(1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_that_do_not_share_keys_so_are_refused(name: str) -> None:
    which, change = BROKEN[name]
    rows, window, entries = rows_of(builder(LIMITS).build_for(batch_of([3], [69]), [C128A])[C128A])
    check_request_rows(rows, window, entries)
    assert entries.lens.tolist() == [4, 4, 4]

    change(window if which == "window" else entries)

    said = "begins no earlier" if which == "window" else "the first of the later row"
    with pytest.raises(ArgumentError, match=f"^request_rows: expected that .*{said}, got rows . and ., .* -> give"):
        check_request_rows(rows, window, entries)


def test_a_row_that_sees_nothing_may_stand_among_rows_of_its_request() -> None:
    """As engines have it whose tokens that are not real keep their request."""
    rows, window, entries = rows_of(builder(LIMITS).build_for(batch_of([3], [69]), [C128A])[C128A])
    for lens in (window.lens, entries.lens):
        lens[1] = 0

    check_request_rows(rows, window, entries)

    assert groups_of(rows, window.lens, 4) == [[0], [1], [2]]


class Listening(ReferenceBackend):
    """A backend that was built before the field, and calls as it gets them."""

    name = "listening"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        self.calls.append(call)
        return lambda tensors: self.decode(call.with_tensors(tensors))

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        return None


@pytest.mark.parametrize("kind", [SWA, C4A, C128A])
def test_a_backend_gets_them_and_may_ignore_them(kind: LayerKind) -> None:
    fixture = StepFixture(kind=kind, requests=((14, 3), (30, 2), (0, 1)), num_speculative_tokens=2)
    backend = Listening()

    fixture.check(backend)

    (call,) = backend.calls
    assert call.request_rows is not None
    assert call.request_rows.max_tokens == 3
    assert call.request_rows.token_to_req.tolist() == [0, 0, 0, 1, 1, 2]
    assert call.with_tensors(call.tensors).request_rows is call.request_rows


def test_metadata_made_by_an_engine_promise_nothing_and_a_wrong_promise_is_seen_in_debug_mode() -> None:
    fixture = StepFixture(kind=C128A, requests=((14, 3), (30, 2)), num_speculative_tokens=2)
    backend = Listening()
    args = fixture.problem(backend)
    swa, compressed = args.metadata.swa, args.metadata.compressed
    assert compressed is not None

    # both parts have to promise it
    for metadata in (
        evolve(args.metadata, swa=evolve(swa, decode_requests=None)),
        evolve(args.metadata, compressed=evolve(compressed, decode_requests=None)),
    ):
        fixture.compare(*evolve(args, metadata=metadata).run(backend))
        assert backend.calls.pop().request_rows is None
    swa.decode_swa_indices[1] = swa.decode_swa_indices[0].clone()
    with pytest.raises(ArgumentError, match=r"^request_rows: expected that the later row's window"):
        args.run(backend)
    args.run(backend, args.workspace(backend, debug=False))


def test_fields_of_metadata_that_an_engine_fills_itself_have_defaults() -> None:
    swa: Any = builder(LIMITS).build(batch_of([3], [40]))
    known = {f.name: getattr(swa, f.name) for f in fields(type(swa)) if f.name != "decode_requests"}

    assert WindowMetadata(**known).decode_requests is None
