"""Tests in which SGLang's engine serves requests on a GPU, with everything that SGLang compiles.

They run from this folder alone, because the tests around it fake a GPU:

    python -m pytest --confcutdir=. -n 5 --maxschedchunk=1 .       in integrations/dsv4attn-sglang/tests/on_gpu

Elsewhere, and where SGLang or a GPU are absent, they are skipped. The model and transformers' answers are those of the
tests of vLLM's wheel.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _obstacle() -> str:
    """Why SGLang's engine cannot run here, or an empty string."""
    if "fakes" in sys.modules:
        return "the tests in the parent folder fake a GPU: run pytest here with --confcutdir=."
    if find_spec("sglang") is None:
        return "needs SGLang"
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU"


OBSTACLE = _obstacle()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder, with the reason."""
    for item in items:
        if OBSTACLE and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=OBSTACLE))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where results and logs go, by default a folder of pytest's."""
    parser.addoption("--results", type=Path, help="folder for results (JSON) and logs of engines")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of checkpoints. All processes of pytest share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    shared = Path(os.environ.get("TEST_CHECKPOINTS", shared / "checkpoints"))
    shared.mkdir(parents=True, exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> dict[str, Path]:
    """Folders of the model: "plain", "mtp" and "dspark"."""
    from small_model import SIZES, checkpoint, checkpoint_with_drafts, made_once

    from on_gpu.scenarios import write_for_sglang

    folders = {name: shared / name for name in ("plain", "mtp", "dspark")}

    def make() -> None:
        checkpoint(folders["plain"], SIZES)
        for method in ("mtp", "dspark"):
            checkpoint_with_drafts(folders[method], folders["plain"], method)
        for folder in folders.values():
            write_for_sglang(folder)

    made_once(shared, "v4", make)
    return folders


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """Transformers' model of these weights in fp32."""
    from small_model import SIZES, model_on_gpu

    return model_on_gpu(SIZES)


@pytest.fixture(scope="session")
def v41_checkpoint(shared: Path) -> Path:
    """The folder of a DeepSeek-V4.1."""
    from small_model import made_once
    from small_v41 import SIZES_V41, checkpoint_v41

    made_once(shared, "v41", lambda: checkpoint_v41(shared / "v41", SIZES_V41))
    return shared / "v41"


@pytest.fixture(scope="session")
def v41_model(v41_checkpoint: Path) -> Any:
    """The reference of its weights in fp32, with keys rounded as SGLang rounds them on Hopper: entries to 4 bits."""
    import torch
    from small_v41 import SIZES_V41, saved_v41

    torch.backends.cuda.matmul.allow_tf32 = False
    return saved_v41(v41_checkpoint, SIZES_V41).to("cuda").rounded()


@pytest.fixture
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder for results and logs of this test."""
    folder: Path = request.config.getoption("--results") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder
