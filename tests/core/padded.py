"""Steps of whole layers with requests and rows of padding: stale positions, stale tables, and NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import Batch
from tests.core.whole import Requests, Whole

STALE = (2**40, -5, 0, 2**31 - 1, 1, -(2**62))
"""Positions that rows of padding have: what another step left there."""
TABLES = "block_table", "compressed_block_table", "c4a_state_block_table", "c128a_state_block_table"


def stale(count: int) -> Tensor:
    """[count] positions of padding."""
    return torch.tensor([STALE[i % len(STALE)] for i in range(count)], dtype=torch.int64)


def padded_batch(batch: Batch, fill: int | None, counts: Sequence[int], *, behind: int = 0) -> Batch:
    """A batch with requests of so many tokens of padding after its own, and rows that are no tokens after these.

    fill: the elements of the tables' rows of padding; None: those of the first request.
    """
    starts = [*batch.query_start_loc_cpu.tolist()]
    for count in counts:
        starts.append(starts[-1] + count)
    lens = torch.cat([batch.seq_lens_cpu, torch.tensor(counts, dtype=torch.int32)])
    start_loc = torch.tensor(starts, dtype=torch.int32)
    slots = torch.full((sum(counts) + behind,), -1, dtype=torch.int64)
    changed: dict[str, Any] = {}
    for name in TABLES:
        table = getattr(batch, name)
        if table is not None:
            # an engine's tables have columns, also where no request has a block
            table = torch.nn.functional.pad(table, (0, int(not table.shape[1])), value=-1)
            row = table[:1] if fill is None and len(table) else table.new_full((1, table.shape[1]), fill or 0)
            changed[name] = torch.cat([table, row.expand(len(counts), -1)])
    return evolve(
        batch,
        num_reqs=batch.num_reqs + len(counts),
        query_start_loc=start_loc,
        query_start_loc_cpu=start_loc,
        seq_lens=lens,
        seq_lens_cpu=lens,
        slot_mapping=torch.cat([batch.slot_mapping, slots]),
        **changed,
    )


def pad(whole: Whole, fill: int | None, *, validate: bool = True) -> Whole:
    """Let every step of these layers have two requests of padding, and two rows after the tokens; all must be zero.

    fill: see `padded_batch`.
    """
    manager = whole.manager
    manager.builder.validate = validate

    def run(requests: Requests, hidden: Tensor, *, padding: int = 0) -> list[Tensor]:
        assert not padding
        most = max((count for _, count in requests), default=0)
        least = whole.limits.decode_threshold
        # padding is of the phase of the last request, as decodes come first
        counts, behind = [1 if most <= least else least + 1] * 2, 2
        batch = padded_batch(manager.batch(requests), fill, counts, behind=behind)
        rows = sum(counts) + behind
        positions = torch.cat([manager.positions(requests), stale(rows)])
        values = torch.cat([hidden, torch.full((rows, hidden.shape[1]), torch.nan, dtype=hidden.dtype)])
        with torch.no_grad(), set_forward_context(manager.metadata(batch)):
            outs = [layer(values, positions) for layer in whole.layers]
        for out in outs:
            assert not out[len(hidden) :].any(), "rows of padding are zero"
        return [out[: len(hidden)] for out in outs]

    whole.run = run  # type: ignore[method-assign]
    return whole


def all_bytes(whole: Whole) -> list[Tensor]:
    """Bytes of every cache of the layers."""
    caches = [cache for layer in whole.manager.caches for cache in layer.present.values()]
    return [cache.tensor.contiguous().view(torch.uint8) for cache in caches]
