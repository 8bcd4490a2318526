"""One process with SGLang's attention in it; `fakes` says what is faked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for name in [name for name in os.environ if name.startswith("DSV4ATTN_")]:
    del os.environ[name]

import fakes  # noqa: E402 - after the environment

fakes.install()

import kit as sglang_kit  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# the repository's own tests make the interpreter many times faster
sys.path.append(str(Path(__file__).parents[3]))
from tests.interpreter import patch_interpreter  # noqa: E402

fakes.round_as_torch()
patch_interpreter()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_choices() -> Iterator[None]:
    """Backends are chosen anew in every test: the variable differs."""
    from dsv4attn.compat.direct import forget_choices

    forget_choices()
    yield
    forget_choices()


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend of dsv4attn, asked for by the variable that a user sets."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", request.param)
    return str(request.param)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang is told that this is a machine of CUDA."""
    sglang_kit.loaded()
    import sglang.srt.utils
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.layers.attention.dsv4 import compressor_v2
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    for module in (sglang.srt.utils, deepseek_v4_backend):
        monkeypatch.setattr(module, "is_cuda", lambda: True)
    for module in (deepseek_v4_backend, compressor_v2):
        monkeypatch.setattr(module, "create_paged_compressor_data", lambda **given: None)
    monkeypatch.setattr(PagedIndexerMetadata, "__post_init__", lambda self: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)


@pytest.fixture
def kit(cuda: None) -> Any:
    """SGLang's kit of tests."""
    return sglang_kit.loaded()
