"""Compiling every form of every kernel before the first request, and proof that nothing was left out.

Compiled kernels go to Triton's own cache on disk (TRITON_CACHE_DIR), which several processes may fill at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching import runtime
from dsv4attn.backends._triton.launching.runtime import device_context, require_driven
from dsv4attn.backends._triton.untyped import CompiledKernel

__all__ = ["compiled", "threads", "warm"]

_log = logging.getLogger("dsv4attn")
_MOST = 16


def threads() -> int:
    """Threads that compile; every process of a machine with several devices has so many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST)


def warm(variants: Iterable[Variant], device: torch.device, *, name: str = "a backend") -> int:
    """Compile variants for a device that is here and load them onto it, launching nothing. Returns how many there are.

    device: of the kind that `launch` is given. name: of the backend, for the log. Interpreted kernels are only counted.
    A kernel that the device cannot hold raises here, as Triton says it, and not in the first request.
    """
    require_driven(device)
    chosen = list(dict.fromkeys(variants))
    if runtime.INTERPRETED:
        return len(chosen)
    begin = time.perf_counter()
    forms = [(variant, far) for variant in chosen for far in ((False, True) if runtime.FAR_FORMS else (False,))]
    with device_context(device), compiled() as seen:
        with ThreadPoolExecutor(threads()) as executor, triton.AsyncCompileMode(executor):
            kernels = [_compile(variant, far=far) for variant, far in forms]
        for kernel in kernels:
            _load(kernel)
    took, fresh = time.perf_counter() - begin, sum(not hit for _, hit in seen)
    text = "dsv4attn: %s is warm: %d kernels on %s, of which %d were compiled now, in %.1f s"
    _log.info(text, name, len(forms), device, fresh, took)
    return len(forms)


def _compile(variant: Variant, *, far: bool) -> CompiledKernel:
    return variant.kernel.warmup(*variant.stand_ins(far=far), grid=(1,), **dict(variant.constants), **variant.options)


def _load(kernel: CompiledKernel) -> None:
    """Load a binary, which otherwise the first launch would do, maybe while a graph is captured."""
    done = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
    # a property that loads when it is read
    done.run  # noqa: B018


@contextmanager
def compiled() -> Iterator[list[tuple[str, bool]]]:
    """Collect the kernels that Triton compiles in this process meanwhile: (name, whether its disk cache had it).

    Either is a stall. A launch of a form that this process has compiled before adds nothing.
    """
    seen: list[tuple[str, bool]] = []
    knobs = triton.knobs.compilation
    before = knobs.listener

    def listen(**told: Any) -> None:  # noqa: ANN401 - what Triton says
        seen.append((told["src"].name, told["cache_hit"]))
        if before is not None:
            before(**told)

    knobs.listener = listen
    try:
        yield seen
    finally:
        knobs.listener = before
