"""Tests in which vLLM's engine serves requests on a GPU, with everything that vLLM compiles.

They run from this folder alone, because the tests around it fake a CPU:

    python -m pytest --confcutdir=. -n 6 .          in integrations/dsv4attn-vllm/tests/on_gpu

Elsewhere, and where vLLM's compiled parts or a GPU are absent, they are skipped.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process of pytest at a time."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
    from small_model import checkpoint, checkpoint_with_drafts

    from on_gpu.scenarios import SIZES

    folders = {name: shared_folder / name for name in ("plain", "mtp", "dspark")}
    with _locked(shared_folder / "lock"):
        if not (shared_folder / "complete").exists():
            checkpoint(folders["plain"], SIZES)
            for method in ("mtp", "dspark"):
                checkpoint_with_drafts(folders[method], folders["plain"], method)
            (shared_folder / "complete").touch()
    return folders


@pytest.fixture(scope="session")
def v41_checkpoints(shared_folder: Path) -> dict[str, Path]:
    """Folders of DeepSeek-V4.1: "v41", and "v41-dspark" with drafts."""
    from small_model import checkpoint_with_drafts
    from small_v41 import checkpoint_v41

    from on_gpu.scenarios import V41_SIZES

    folders = {name: shared_folder / name for name in ("v41", "v41-dspark")}
    with _locked(shared_folder / "lock-v41"):
        if not (shared_folder / "complete-v41").exists():
            checkpoint_v41(folders["v41"], V41_SIZES)
            checkpoint_with_drafts(folders["v41-dspark"], folders["v41"], "dspark")
            (shared_folder / "complete-v41").touch()
    return folders


@pytest.fixture(scope="session")
def stages_checkpoint(shared_folder: Path) -> Path:
    """The folder of a model for pipeline parallelism."""
    from small_model import checkpoint

    from on_gpu.scenarios import SIZES_OF_STAGES

    folder = shared_folder / "stages"
    with _locked(shared_folder / "lock-stages"):
        if not (shared_folder / "complete-stages").exists():
            checkpoint(folder, SIZES_OF_STAGES)
            (shared_folder / "complete-stages").touch()
    return folder


@pytest.fixture(scope="session")
def v41_model() -> Any:
    """The reference of its weights in fp32."""
    import torch
    from small_v41 import random_v41

    from on_gpu.scenarios import V41_SIZES

    torch.backends.cuda.matmul.allow_tf32 = False
    return random_v41(V41_SIZES).to("cuda")


@pytest.fixture(scope="session")
def transformers_model(checkpoints: dict[str, Path]) -> Any:
    """Transformers' model of these weights in fp32."""
    from on_gpu.scenarios import SIZES

    return _model_on_gpu(SIZES)


@pytest.fixture(scope="session")
def stages_model(stages_checkpoint: Path) -> Any:
    """The same of the model for pipeline parallelism."""
    from on_gpu.scenarios import SIZES_OF_STAGES

    return _model_on_gpu(SIZES_OF_STAGES)


def _model_on_gpu(sizes: dict[str, Any]) -> Any:
    """Transformers' model in fp32. Its attention takes some queries at a time, for memory."""
    import torch
    from small_model import random_model
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    torch.backends.cuda.matmul.allow_tf32 = False
    _attend_in_parts(modeling)
    return random_model(sizes).cuda()


@cache
def _attend_in_parts(modeling: Any) -> None:
    """Let transformers' attention take some queries at a time."""
    import torch

    attend, rows = modeling.eager_attention_forward, 512

    def attend_in_parts(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[Any, None]:
        parts = zip(query.split(rows, dim=2), attention_mask.split(rows, dim=2), strict=True)
        return torch.cat([attend(module, q, key, value, mask, **options)[0] for q, mask in parts], dim=1), None

    modeling.eager_attention_forward = attend_in_parts


@pytest.fixture
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder for results and logs of this test."""
    folder: Path = request.config.getoption("--results") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder
