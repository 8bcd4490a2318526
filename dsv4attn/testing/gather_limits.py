"""Gathering with lengths beyond the block table, beyond the rows of the output, or before the first position."""

from __future__ import annotations

import numpy as np
import torch

from dsv4attn.core.contract.backend import KeyForm
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong
from dsv4attn.testing.check_insert import CacheRows
from dsv4attn.testing.random_step import normal

__all__ = ["gathers_within"]

MOST = 2**31 - 1
SEQ_LENS = (9, 40, 3, 5, 0, MOST, -3, -MOST - 1, 6, 2)
GATHER_LENS = (9, 30, 8, MOST, MOST, 4, 7, MOST, -2, 0)
"""Lengths of each request: all records, past the table, before the first position, past the output, and lengths that no
request has."""
ROWS = 12
"""Rows of the output that a request has."""
UNTOUCHED = -3.0


def gathers_within(bench: Bench, rows: CacheRows) -> Measure:
    """Records that exist go to rows that exist; every other row, and the memory around the output, stays as it is."""
    if bench.backend.forms.prefill_keys is not KeyForm.GATHERED:
        raise SkipCase("does not apply: this backend reads pages in prefill and gathers nothing")
    size, dim = rows.placement.block_size, rows.layer.head_dim
    slots = np.arange(rows.blocks * size)
    oracle_cache = rows.blank().write(slots, normal((rows.seed, 45), slots, dim))
    # columns behind the table hold blocks that exist; a gather must not read them
    blocks = np.random.default_rng((rows.seed, 46)).integers(0, rows.blocks, (len(SEQ_LENS), 5))
    table = rows.tensor(blocks).int()[:, :3]
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=rows.device)
    gather_lens = torch.tensor(GATHER_LENS, dtype=torch.int32, device=rows.device)
    shape = len(SEQ_LENS) + 2, ROWS + 2, dim
    for lens, offset in ((None, 0), (gather_lens, 0), (gather_lens, 4), (None, ROWS), (gather_lens, ROWS + 1)):
        memory = torch.full(shape, UNTOUCHED, dtype=rows.layout.row_dtype, device=rows.device)
        wanted = memory.double().cpu().numpy()
        bench.backend.dequantize_and_gather_k_cache(
            memory[1:-1, 1:-1], oracle_cache.cache, seq_lens, lens, table, offset
        )
        for i, seq_len in enumerate(SEQ_LENS):
            count = max(seq_len, 0) if lens is None else GATHER_LENS[i]
            for j in range(ROWS - offset):
                position = max(seq_len, 0) - count + j
                if j < count and 0 <= position < table.shape[1] * size:
                    wanted[1 + i, 1 + offset + j] = oracle_cache.values[
                        blocks[i, position // size] * size + position % size
                    ]
        found = memory.double().cpu().numpy()
        if not np.array_equal(found, wanted):
            i, row = (int(axis[0]) for axis in (found != wanted).any(-1).nonzero())
            lengths = f"seq_len {SEQ_LENS[i - 1]}, gather_len {GATHER_LENS[i - 1] if lens is not None else None}"
            where = (
                f"request {i - 1} of {len(SEQ_LENS)}, row {row - 1} of {ROWS}"
                if 0 < i <= len(SEQ_LENS)
                else "memory around"
            )
            raise Wrong(f"{where}, offset {offset} ({lengths}) is not what it should be")
    return Measure()
