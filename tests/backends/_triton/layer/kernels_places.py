"""A kernel that says where a kernel of the layer reads."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.layer.projections.kernels_output import parts_of_rows

__all__ = ["places_ahead"]


@triton.jit
def places_ahead(
    W, PLACES, w_stride, tokens, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Grid: as of `project_codes_kernel`. Writes to PLACES [programs, AHEAD / 512, 128] what a program asks for."""
    for start in tl.static_range(0, AHEAD, 512):
        part = parts_of_rows(W, w_stride, tokens, RANK, BLOCK_M, BLOCK_N, start)
        place = PLACES + (tl.program_id(0) * AHEAD + start) // 512 * 128
        tl.store(place + tl.arange(0, 128), part.to(tl.int64))
