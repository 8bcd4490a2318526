"""Triton interpreted on a CPU, and `flash_mla` taken from this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

for name in [name for name in os.environ if name.startswith("DSV4ATTN_")]:
    del os.environ[name]
os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")

import dsv4attn_flash_mla
import pytest

# the repository's own tests make the interpreter many times faster
sys.path.append(str(Path(__file__).parents[3]))
from integrations.interpreter import round_as_torch
from tests.fast_interpreter.patches import patch_interpreter
from tests.fixtures import own_temporary_folder, seeded  # noqa: F401 - fixtures

round_as_torch("fp8e4nv")
patch_interpreter()


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`flash_mla` is this package's in every test: the environment of the tests has SGLang's FlashMLA too."""
    from dsv4attn.compat.direct import forget_choices

    monkeypatch.setenv(dsv4attn_flash_mla.VARIABLE, "1")
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    dsv4attn_flash_mla.provide()
    forget_choices()
    yield
    monkeypatch.setenv(dsv4attn_flash_mla.VARIABLE, "0")
    dsv4attn_flash_mla.provide()
    sys.modules.pop("flash_mla", None)
    forget_choices()
