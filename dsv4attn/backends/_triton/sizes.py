"""Sizes computed from other sizes, for launchers, and for constants in kernels.

Triton has the same two functions, but engines replace them: SGLang puts a plain function in the place of
`triton.next_power_of_2` when it is imported, and a kernel that calls a plain function does not compile. Kernels
therefore read nothing of Triton but its language.
"""

from __future__ import annotations

import triton


@triton.constexpr_function  # type: ignore[untyped-decorator, unused-ignore]
def cdiv(a: int, b: int) -> int:
    """The quotient of a and a positive b, rounded up. A kernel calls it for constants, and `tl.cdiv` for values."""
    return -(-a // b)


@triton.constexpr_function  # type: ignore[untyped-decorator, unused-ignore]
def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n, which is 1 for n = 0. A kernel calls it for constants."""
    return 1 << max(n - 1, 0).bit_length()
