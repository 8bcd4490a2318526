"""Triton's key of a kernel does not depend on which kernels had a key before."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.jit import JITFunction

from dsv4attn.backends._triton.compiling.kernel_keys import settle_key
from tests.backends._triton.launching.kernels_small import rows
from tests.programs import import_text

TEXT = """
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

DEEP = tl.constexpr(4)


@JITFunction
def deepest(x):
    return x + DEEP


@JITFunction
def middle(x):
    return [deepest(one) for one in (x, x)][0]


@JITFunction
def kernel(x):
    tl.store(x, middle(1))


@JITFunction
def calls_itself(x):
    calls_itself(x)
"""


@pytest.fixture
def module(tmp_path: Path, request: pytest.FixtureRequest) -> ModuleType:
    """Kernels without keys."""
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    return import_text(tmp_path / f"kernels_of_{name}.py", TEXT)


def settled(module: ModuleType, *names: str) -> str:
    """The key of the kernel after functions of these names got theirs."""
    for name in (*names, "kernel"):
        settle_key(getattr(module, name))
    return str(module.kernel.cache_key)


@pytest.mark.parametrize("first", [(), ("middle",), ("deepest",), ("deepest", "middle")], ids="-".join)
def test_a_key_does_not_depend_on_which_functions_had_keys_before(
    module: ModuleType, tmp_path: Path, first: tuple[str, ...]
) -> None:
    again = import_text(tmp_path / f"{module.__name__}_again.py", TEXT)

    assert settled(module, *first) == settled(again)
    assert [name for name, _ in module.kernel.used_global_vals] == ["DEEP"]


def test_a_key_that_exists_stays(module: ModuleType) -> None:
    module.kernel.hash = "of this process"
    settle_key(module.kernel)

    assert module.kernel.hash == "of this process"
    assert module.middle.hash is None


def test_a_function_that_calls_itself_gets_a_key(module: ModuleType) -> None:
    settle_key(module.calls_itself)
    assert module.calls_itself.hash is not None


@pytest.mark.skipif(isinstance(rows, JITFunction), reason="kernels are not interpreted here")
def test_an_interpreted_kernel_has_no_key() -> None:
    settle_key(rows)
    assert not hasattr(rows, "hash")
