"""The process group of a command that torchrun has started on every rank."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from dsv4attn.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from dsv4attn.core.model.geometry import ModelGeometry
    from dsv4attn.tools.replay.over_ranks import MeteredContext

OPTION = "--context-parallel"
TIMEOUT = timedelta(minutes=5)
"""The longest wait for another rank: no exchange of a run takes that long."""
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_ranks(ranks: int, geometry: ModelGeometry) -> None:
    """Raise ArgumentError unless torchrun has started `ranks` processes and the model can be served over them."""
    if geometry.shared_latent:
        hint = f"leave out {OPTION}: layers of V4.1 share caches and selections, which ranks cannot divide yet"
        raise ArgumentError(OPTION, expected="a model of DeepSeek-V4", actual=geometry.name, hint=hint)
    launched(OPTION, ranks)


def launched(argument: str, ranks: int | None = None) -> int:
    """The number of processes that torchrun has started.

    Raises ArgumentError, with the command to type, without torchrun, or if they are not as many as `ranks`. argument:
    what the error is about. ranks: None: any number.
    """
    arguments = shlex.join(sys.argv[1:])
    command = f"type: torchrun --standalone --nproc-per-node {ranks or 2} -m dsv4attn {arguments}"
    expected = f"{'' if ranks is None else f'{ranks} '}processes that torchrun has started"
    if any(name not in os.environ for name in _SET_BY_TORCHRUN):
        raise ArgumentError(argument, expected=expected, actual="one process, without torchrun", hint=command)
    started = int(os.environ["WORLD_SIZE"])
    if ranks is not None and started != ranks:
        raise ArgumentError(argument, expected=expected, actual=f"{started} processes", hint=command)
    return started


@contextmanager
def joined(
    ranks: int, interleave: int = 1, *, backend: str = "gloo", device: torch.device | None = None
) -> Iterator[MeteredContext]:
    """The group of all ranks, inside a `with` block.

    interleave: consecutive entries of one rank. backend: of torch.distributed. device: of this rank, an accelerator,
    and the current one: objects are exchanged through it. None: the CPU.
    """
    from torch import distributed

    from dsv4attn.tools.replay.over_ranks import MeteredContext

    if os.environ.get("LOCAL_WORLD_SIZE") == str(ranks) and sys.platform == "linux":
        # all ranks are on this machine: its name need not resolve to an address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(backend, timeout=TIMEOUT, device_id=device)
    everyone = distributed.group.WORLD
    assert everyone is not None
    try:
        yield MeteredContext(everyone, interleave)
    except BaseException:
        # exchanges may be under way on a device, and the end of the group would wait for them
        if device is None:
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()
