"""Tests in which vLLM's engine serves requests on a GPU, with everything that vLLM compiles.

They run from this folder alone, because the tests around it fake a CPU:

    python -m pytest --confcutdir=. -n 6 .          in integrations/dsv4attn-vllm/tests/on_gpu

Elsewhere, and where vLLM's compiled parts or a GPU are absent, they are skipped.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _obstacle() -> str:
    """Why vLLM's engine cannot run here, or an empty string."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "the tests in the parent folder fake a CPU: run pytest here with --confcutdir=."
    if find_spec("vllm") is None or find_spec("vllm._C_stable_libtorch") is None:
        return "needs vLLM with its compiled parts"
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
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of checkpoints. All processes of pytest share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    shared = Path(os.environ.get("TEST_CHECKPOINTS", shared / "checkpoints"))
    shared.mkdir(parents=True, exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def checkpoints(shared_folder: Path) -> dict[str, Path]:
    """Folders of the model: "plain", "mtp" and "dspark"."""
    from small_model import SIZES, checkpoint, checkpoint_with_drafts, made_once

    folders = {name: shared_folder / name for name in ("plain", "mtp", "dspark")}

    def make() -> None:
        checkpoint(folders["plain"], SIZES)
        for method in ("mtp", "dspark"):
            checkpoint_with_drafts(folders[method], folders["plain"], method)

    made_once(shared_folder, "v4", make)
    return folders


@pytest.fixture(scope="session")
def v41_checkpoints(shared_folder: Path) -> dict[str, Path]:
    """Folders of DeepSeek-V4.1: "v41", and "v41-dspark" with drafts."""
    from small_model import checkpoint_with_drafts, made_once
    from small_v41 import SIZES_V41, checkpoint_v41

    folders = {name: shared_folder / name for name in ("v41", "v41-dspark")}

    def make() -> None:
        checkpoint_v41(folders["v41"], SIZES_V41)
        checkpoint_with_drafts(folders["v41-dspark"], folders["v41"], "dspark")

    made_once(shared_folder, "v41", make)
    return folders


@pytest.fixture(scope="session")
def stages_checkpoint(shared_folder: Path) -> Path:
    """The folder of a model for pipeline parallelism."""
    from small_model import checkpoint, made_once

    from on_gpu.scenarios import SIZES_OF_STAGES

    folder = shared_folder / "stages"
    made_once(shared_folder, "stages", lambda: checkpoint(folder, SIZES_OF_STAGES))
    return folder


@pytest.fixture(scope="session")
def v41_model(v41_checkpoints: dict[str, Path]) -> Any:
    """The reference of its weights in fp32."""
    import torch
    from small_v41 import SIZES_V41, saved_v41

    torch.backends.cuda.matmul.allow_tf32 = False
    return saved_v41(v41_checkpoints["v41"], SIZES_V41).to("cuda")


@pytest.fixture(scope="session")
def transformers_model(checkpoints: dict[str, Path]) -> Any:
    """Transformers' model of these weights in fp32."""
    from small_model import SIZES, model_on_gpu

    return model_on_gpu(SIZES)


@pytest.fixture(scope="session")
def stages_model(stages_checkpoint: Path) -> Any:
    """The same of the model for pipeline parallelism."""
    from small_model import model_on_gpu

    from on_gpu.scenarios import SIZES_OF_STAGES

    return model_on_gpu(SIZES_OF_STAGES)


@pytest.fixture
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder for results and logs of this test."""
    folder: Path = request.config.getoption("--results") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder
