"""Processes of their own, forked from one that has imported vLLM and nothing of these tests.

An import of vLLM takes ten seconds. The process that is forked has imported it once, has no other thread, and has run
none of it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.gpu.attn_utils"])


def _work(log: Path, environment: dict[str, str], function: Callable[..., object], arguments: dict[str, Any]) -> None:
    """What a process does: its environment is that of the test, not that in which the first process was started."""
    os.environ.clear()
    os.environ.update(environment)
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    function(**arguments)


def run(folder: Path, function: Callable[..., object], *arguments_of_each: dict[str, Any]) -> str:
    """Call a function with these arguments, each in a process, at once: what the processes printed, one after another.

    The function is found by its module's name and its own. folder: for what is printed.
    """
    logs = [folder / f"process{i}.log" for i in range(len(arguments_of_each))]
    work = [
        (log, dict(os.environ), function, arguments) for log, arguments in zip(logs, arguments_of_each, strict=True)
    ]
    processes = [_FORKS.Process(target=_work, args=inputs) for inputs in work]
    for process in processes:
        process.start()
    while running := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in running])
        # the others of a group would wait for one that failed
        for process in running if any(process.exitcode for process in processes) else []:
            process.terminate()
    printed = "".join(log.read_text() for log in logs)
    assert [process.exitcode for process in processes] == [0] * len(arguments_of_each), printed[-3000:]
    return printed


def execute(code: str, **names: object) -> None:
    """Run code as a script that has these names."""
    exec(code, {"__name__": "__main__", **names})  # noqa: S102 - the code of a test


ROCM = """
import sys
sys.path.insert(0, {tests!r})
import conftest, torch
from types import SimpleNamespace
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
    gcnArchName="gfx950:sramecc+", multi_processor_count=256, warp_size=64, name="", total_memory=2**38
)
"""


def run_on_rocm(folder: Path, code: str) -> str:
    """Run code in a process that takes itself for one with an MI355, and return what it printed.

    Faked: the properties of the GPU, which vLLM's modules for ROCm ask for when they are imported.
    """
    return run(folder, execute, {"code": ROCM.format(tests=str(Path(__file__).parent)) + code})
