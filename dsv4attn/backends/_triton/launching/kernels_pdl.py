"""What kernels do that are launched while the kernel before them still ends: functions that they call.

A kernel with constant PDL waits, before it reads or writes anything, until all kernels before it have ended, and lets
the next one begin only after that. So whatever kernel comes next, with this attribute or not, finds every result of
those before this one even if it does not wait at once. Kernels that combine what the one before them has computed rely
on that: they read lengths and sinks, which both get, before they wait. So does Hopper's output projection for few
tokens, with its weights.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

FEW_ROWS = tl.constexpr(16)
"""Most rows of a launch whose next kernel may begin at once, see `launch_dependents_of_few`."""
FEW_ENTRIES, IN_ALL = tl.constexpr(16384), tl.constexpr(131072)
"""Most entries of such a row, and of all these rows together.

With PDL 1 row of 32,768 entries took 26.3 us and not 20.7 in a graph, 8 rows of 65,536 up to 5 us more (`triton`,
H200).
"""


@triton.jit
def wait_prior_grid(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended; nothing if not PDL. First in a kernel."""
    if PDL:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel be launched once all programs have called this or ended; nothing if not PDL.

    Its programs go where there is room. So a kernel whose programs end at different times calls this late: otherwise
    the next kernel crowds the multiprocessors that have nothing to do.
    """
    if PDL:
        text: tl.constexpr = "griddepcontrol.launch_dependents; // $0"
        tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def launch_dependents_of_few(rows, entries, PDL: tl.constexpr):
    """`launch_dependents` if a launch has few rows of few entries: then the next one has few programs, and room.

    The kernel calls `launch_dependents` later in any case; of a program, the first call counts.
    """
    if PDL:  # noqa: SIM102 - one is a constant
        if (rows <= FEW_ROWS) & (entries <= FEW_ENTRIES) & (rows * entries <= IN_ALL):
            launch_dependents(PDL)


@triton.jit
def wait_then_launch_dependents(PDL: tl.constexpr):
    """Wait for the kernels before this one, then let the next one begin: first in a short kernel."""
    wait_prior_grid(PDL)
    launch_dependents(PDL)
