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
from gpu_tests import pytest_addoption, results, shared_folder, skip_in, transformers_model


def _obstacle() -> str:
    """Why vLLM's engine cannot run here, or an empty string."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "the tests in the parent folder fake a CPU: run pytest here with --confcutdir=."
    if find_spec("vllm") is None or find_spec("vllm._C_stable_libtorch") is None:
        return "needs vLLM with its compiled parts"
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU"


pytest_collection_modifyitems = skip_in(Path(__file__).parent, _obstacle())


@pytest.fixture(scope="session")
def checkpoints(shared_folder: Path) -> dict[str, Path]:
    """Folders of the model: "plain", "mtp" and "dspark"."""
    from small_model import v4_checkpoints

    return v4_checkpoints(shared_folder)


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
    from small_v41 import v41_on_gpu

    return v41_on_gpu(v41_checkpoints["v41"])


@pytest.fixture(scope="session")
def stages_model(stages_checkpoint: Path) -> Any:
    """The same of the model for pipeline parallelism."""
    from small_model import model_on_gpu

    from on_gpu.scenarios import SIZES_OF_STAGES

    return model_on_gpu(SIZES_OF_STAGES)
