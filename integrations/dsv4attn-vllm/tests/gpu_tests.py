"""What the tests of two engines on a GPU share: fixtures, requests, and the process of an engine (on_gpu/)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, frozen

RMS, GAP = 0.05, 0.1
"""Bounds of the error of log-probabilities, which spread by 1.0, and of `worst_gap`. Engines compute in bf16."""


@frozen
class Round:
    """Prompts that are given to the engine at once, and how many tokens each answer has.

    of_prompts: whether log-probabilities of the prompts are asked for; engines then take nothing from a prefix cache.
    """

    prompts: Sequence[Sequence[int]]
    tokens: int = 32
    of_prompts: bool = False

    def input(self) -> dict[str, Any]:
        """As worker.py reads it."""
        return asdict(self)


def run_engine(
    worker: Path, results: Path, name: str, scenario: Mapping[str, Any], timeout: float, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Run worker.py on a scenario, for `timeout` seconds at most: what it saves, how long it took, and its log."""
    file, out, log = (results / f"{name}.{suffix}" for suffix in ("json", "pt", "log"))
    file.write_text(json.dumps(scenario))
    command = [sys.executable, worker, file, out]
    # several engines at once would otherwise have more threads than there are cores
    environment = {"OMP_NUM_THREADS": "2", **os.environ, **variables}
    begin = time.perf_counter()
    with log.open("w") as stream:
        output = {"stdout": stream, "stderr": subprocess.STDOUT}
        engine = subprocess.Popen(command, env=environment, process_group=0, **output)
        try:
            code = engine.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # processes of an engine that failed may still be there
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
    text = log.read_text()
    assert code == 0, f"{name}: exit code {code}\n" + text[-2500:]
    import torch

    served = torch.load(out)
    out.unlink()
    return {**served, "seconds": time.perf_counter() - begin, "log": text}


def report(results: Path, name: str, values: Mapping[str, Any]) -> None:
    """Leave the figures of a scenario in the folder of results."""
    (results / f"{name}.figures.json").write_text(json.dumps(values, indent=1))
    print(name, values)


# ---------------------------------------------------------------- for conftest.py


def skip_in(folder: Path, obstacle: str) -> Callable[[list[pytest.Item]], None]:
    """A hook that skips the tests of a folder where there is an obstacle."""

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            if obstacle and folder in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=obstacle))

    return pytest_collection_modifyitems


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where results and logs go, by default a folder of pytest's."""
    parser.addoption("--results", type=Path, help="folder for results (JSON) and logs of engines")


@pytest.fixture
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder for results and logs of this test."""
    folder: Path = request.config.getoption("--results") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of checkpoints. All processes of pytest share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    shared = Path(os.environ.get("TEST_CHECKPOINTS", shared / "checkpoints"))
    shared.mkdir(parents=True, exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """Transformers' model of the weights of "plain" in fp32."""
    from small_model import SIZES, model_on_gpu

    return model_on_gpu(SIZES)
