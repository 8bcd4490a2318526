"""TokenSpeed's ops on a CPU with this plugin's kernels registered; Triton is interpreted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for name in [name for name in os.environ if name.startswith("DSV4ATTN_")]:
    del os.environ[name]
os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")

import pytest
import tokenspeed_python

# the repository's own tests make the interpreter many times faster
sys.path.append(str(Path(__file__).parents[3]))
from integrations.interpreter import round_as_torch
from tests.fast_interpreter.patches import patch_interpreter
from tests.fixtures import own_temporary_folder, seeded  # noqa: F401 - fixtures

round_as_torch("fp8e4nv", "bf16")
patch_interpreter()


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend of dsv4attn, asked for by the variable that a user sets."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", request.param)
    return str(request.param)


@pytest.fixture
def ops() -> Iterator[Any]:
    """TokenSpeed's module of ops. After the test no other kernel than this plugin's was chosen."""
    from dsv4attn.compat.direct import forget_choices

    forget_choices()
    module = tokenspeed_python.load()
    import dsv4attn_tokenspeed
    from tokenspeed_kernel.registry import KernelRegistry

    dsv4attn_tokenspeed.register()
    registry = KernelRegistry.get()
    registry.clear_cache()
    yield module
    chosen = {kernel.name for kernel in registry._selection_cache.values()}
    assert chosen
    assert all(name.startswith("dsv4attn_") for name in chosen), chosen
    forget_choices()
