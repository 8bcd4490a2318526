"""Ranks of a test: processes of their own, forked from one server that has imported what they need."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from typing import Any

from torch.multiprocessing.spawn import start_processes


def run_ranks(serve: Callable[..., None], *args: Any, size: int) -> None:
    """Run `serve(rank, *args)` in a process for each of `size` ranks, and wait for all of them.

    Processes are forked from a server process, which imports torch, the harness and the module of `serve` once: an
    import takes seconds, and each rank would repeat it. The server starts with the first call of this function and
    has the environment of that moment.

    Raises: `torch.multiprocessing.ProcessRaisedException` with the traceback of a rank that fails.
    """
    set_forkserver_preload(["tests.harness", serve.__module__])
    start_processes(serve, args, nprocs=size, start_method="forkserver")
