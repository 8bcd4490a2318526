"""One process with SGLang's attention in it; `fakes` says what is faked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

for name in [name for name in os.environ if name.startswith("DSV4ATTN_")]:
    del os.environ[name]
# the import of SGLang makes this folder, before a fixture could name another temporary folder
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(sys.prefix) / "inductor-cache")

import fakes

fakes.install()

import kit as sglang_kit
import pytest
from dsv4attn_sglang import hooks

# the repository's own tests make the interpreter many times faster
sys.path.append(str(Path(__file__).parents[3]))
from integrations.interpreter import round_as_torch
from tests.fast_interpreter.patches import patch_interpreter
from tests.fixtures import own_temporary_folder, seeded  # noqa: F401 - fixtures

round_as_torch("fp8e4nv")
patch_interpreter()


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
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's kit of tests, with SGLang configured for a machine of CUDA."""
    loaded_kit = sglang_kit.loaded()
    fakes.on_cuda(monkeypatch.setattr)
    return loaded_kit


@pytest.fixture
def interface(kit: Any) -> Any:
    """SGLang's module with FlashMLA's functions, in which ours are."""
    fakes.flash_mla_calls().clear()
    hooks._serve(sglang_kit.runner_of(sglang_kit.case("decode", "DECODE", (5,))))
    return import_module(fakes.FLASH_MLA)
