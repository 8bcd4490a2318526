"""Compiling every variant of every kernel before the first request, and a count of later compilations.

Compiled kernels are stored in Triton's own cache on disk (TRITON_CACHE_DIR), which several processes may fill at once.
Where the cache lacks many forms, worker processes compile them first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from dsv4attn.backends._triton.compiling.aot import threads
from dsv4attn.backends._triton.compiling.processes import FEWEST_FORMS, compile_in_processes
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching import runtime
from dsv4attn.backends._triton.launching.runtime import device_context, require_driven
from dsv4attn.backends._triton.untyped import CompiledKernel

_log = logging.getLogger("dsv4attn")


def warm(variants: Iterable[Variant], device: torch.device, *, name: str = "a backend") -> int:
    """Compile variants for a device of this machine and load them, launching nothing. Returns the number of kernels.

    Interpreted kernels are only counted. name: name of the backend, for the log.
    A kernel that does not fit the device raises Triton's error here instead of in the first request.
    """
    require_driven(device)
    distinct = list(dict.fromkeys(variants))
    if INTERPRETED:
        return len(distinct)
    begin = time.perf_counter()
    forms = [(variant, far) for variant in distinct for far in ((False, True) if runtime.FAR_FORMS else (False,))]
    # an engine may launch kernels in its own thread meanwhile, these among them
    ours = f"dsv4attn-warmup-{threading.get_ident()}"
    with device_context(device), compiled(ours) as seen:
        in_workers, workers = compile_in_processes(forms, driver.active.get_current_target())
        with ThreadPoolExecutor(threads(), ours) as executor:
            with triton.AsyncCompileMode(executor):
                kernels = [_compile(variant, far=far) for variant, far in forms]
            # all of them, and the first error
            list(executor.map(_build_launcher, kernels))
        for kernel in kernels:
            _load(kernel)
    here = [name for name, hit in seen if not hit]
    seconds, new, processes = time.perf_counter() - begin, in_workers + len(here), workers + bool(here)
    # few names tell what an image lacks
    which = f" ({', '.join(sorted({*here}))})" if 0 < new == len(here) < FEWEST_FORMS else ""
    _log.info(
        "dsv4attn: %s is warm: %d kernels on %s, of which %d were compiled now%s, in %.1f s; Triton's cache is %s",
        name,
        len(forms),
        device,
        new,
        f"{which} in {processes} process{'es' if processes > 1 else ''}" if new else "",
        seconds,
        triton.knobs.cache.dir,
    )
    return len(forms)


def _compile(variant: Variant, *, far: bool) -> CompiledKernel:
    return variant.kernel.warmup(*variant.stand_ins(far=far), grid=(1,), **dict(variant.constants), **variant.options)


def _finished(kernel: CompiledKernel) -> CompiledKernel:
    return kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel


def _build_launcher(kernel: CompiledKernel) -> None:
    """Have Triton put the kernel's launcher into its disk cache.

    Triton 3.6 compiles a launcher in C for each signature, when a kernel is loaded. Kernels are loaded one after the
    other. A C compiler is a process of its own, so threads can wait for several at once.
    """
    compiled_kernel = _finished(kernel)
    driver.active.launcher_cls(compiled_kernel.src, compiled_kernel.metadata)


def _load(kernel: CompiledKernel) -> None:
    """Load a binary. Otherwise the first launch loads it, perhaps while a graph is captured."""
    # reading this property loads the binary
    _finished(kernel).run  # noqa: B018


@contextmanager
def compiled(by: str = "") -> Iterator[list[tuple[str, bool]]]:
    """Collect the kernels that this process compiles inside a `with` block: (name, whether Triton's disk cache had it).

    Both cases stall a request. A launch of a variant that this process has compiled before adds nothing.
    by: what the names of the compiling threads begin with.
    """
    seen: list[tuple[str, bool]] = []
    knobs = triton.knobs.compilation
    previous_listener = knobs.listener

    def listen(**event: Any) -> None:  # noqa: ANN401 - Triton's arguments
        if threading.current_thread().name.startswith(by):
            seen.append((event["src"].name, event["cache_hit"]))
        if previous_listener is not None:
            previous_listener(**event)

    knobs.listener = listen
    try:
        yield seen
    finally:
        knobs.listener = previous_listener
