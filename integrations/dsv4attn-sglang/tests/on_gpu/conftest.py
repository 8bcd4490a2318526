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
from gpu_tests import pytest_addoption, results, shared_folder, skip_in, transformers_model


def _obstacle() -> str:
    """Why SGLang's engine cannot run here, or an empty string."""
    if "fakes" in sys.modules:
        return "the tests in the parent folder fake a GPU: run pytest here with --confcutdir=."
    if find_spec("sglang") is None:
        return "needs SGLang"
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU"


pytest_collection_modifyitems = skip_in(Path(__file__).parent, _obstacle())


@pytest.fixture(scope="session")
def checkpoints(shared_folder: Path) -> dict[str, Path]:
    """Folders of the model: "plain", "mtp" and "dspark"."""
    from small_model import v4_checkpoints

    from on_gpu.scenarios import write_for_sglang

    return v4_checkpoints(shared_folder, write_for_sglang)


@pytest.fixture(scope="session")
def v41_checkpoint(shared_folder: Path) -> Path:
    """The folder of a DeepSeek-V4.1."""
    from small_model import made_once
    from small_v41 import SIZES_V41, checkpoint_v41

    made_once(shared_folder, "v41", lambda: checkpoint_v41(shared_folder / "v41", SIZES_V41))
    return shared_folder / "v41"


@pytest.fixture(scope="session")
def v41_model(v41_checkpoint: Path) -> Any:
    """The reference of its weights in fp32, with keys rounded as SGLang rounds them on Hopper: entries to 4 bits."""
    from small_v41 import v41_on_gpu

    return v41_on_gpu(v41_checkpoint).rounded()
