"""A kernel that says where a kernel of the layer reads."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.layer.kernels_output import parts_of_rows

__all__ = ["places_ahead"]


@triton.jit
def places_ahead(W, PLACES, w_stride, token_tiles, RANK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: as of `project_codes_kernel`. Writes to PLACES [programs, 128] what a program asks for first."""
    part = parts_of_rows(W, w_stride, token_tiles, RANK, BLOCK_N)
    tl.store(PLACES + tl.program_id(0) * 128 + tl.arange(0, 128), part.to(tl.int64))
