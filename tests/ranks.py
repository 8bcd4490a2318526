"""Ranks of a test: processes forked from one server that has imported what they need, or started by torchrun."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

from torch import distributed
from torch.multiprocessing.spawn import start_processes

from tests.examples.built_wheels import ROOT


def run_ranks(serve: Callable[..., None], *args: Any, size: int) -> None:
    """Run `serve(rank, *args)` in a process for each of `size` ranks, and wait for all of them.

    Processes are forked from a server process, which imports torch, the harness and the module of `serve` once: an
    import takes seconds, and each rank would repeat it. The server starts with the first call of this function and
    has the environment of that moment.

    Raises: `torch.multiprocessing.ProcessRaisedException` with the traceback of a rank that fails.
    """
    set_forkserver_preload(["tests.harness", serve.__module__])
    start_processes(serve, args, nprocs=size, start_method="forkserver")


@contextmanager
def gloo_group(rank: int, size: int, folder: Path | str) -> Iterator[distributed.ProcessGroup]:
    """The group of `size` ranks with gloo, in the block. They find each other by a file in the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": size}
    # a rank may wait until the others have been through all cases that it has no part in
    distributed.init_process_group("gloo", timeout=dt.timedelta(minutes=10), **store)
    try:
        assert distributed.group.WORLD is not None
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def torchrun(folder: Path, *program: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a program, the words after `python`, in a process for each rank, in a folder and on lines of 80 columns."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    # a run that gets little of the CPU takes minutes; a rank waits five for another, and its error says for what
    return subprocess.run(command, cwd=folder, env=env, timeout=600, capture_output=True, text=True, check=False)
