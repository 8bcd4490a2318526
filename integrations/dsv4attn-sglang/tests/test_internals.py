"""The table of SGLang's names: SGLang 0.5.23 has them, the table has all that this package uses, each is missed."""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dsv4attn_sglang
import pytest
from attrs import evolve
from dsv4attn_sglang import functions, hooks, internals
from dsv4attn_sglang.guard import RefusedError
from dsv4attn_sglang.internals import NEEDED, RUNNER, TABLE
from dsv4attn_sglang.parts import PARTS
from kit import case, runner_of

from dsv4attn.integrations import engine_internals
from dsv4attn.integrations.engine_internals import Stored
from integrations.internals_table import PAGE, written

OURS = sorted(Path(next(iter(dsv4attn_sglang.__path__))).glob("*.py"))


@pytest.fixture
def runner(kit: Any) -> Any:
    return runner_of(case("decode", "DECODE", (5,)))


def test_the_installed_sglang_has_every_name(runner: Any) -> None:
    internals.check("0.5.23", runner)
    internals.check_functions("0.5.23", functions.SM120, PARTS)
    assert set(NEEDED) == set(functions.SM120.values()) | set(functions.XPU.values())


@pytest.mark.parametrize("group", ["all", "indexer"])
def test_each_name_is_missed_and_said(kit: Any, group: str) -> None:
    for entry in TABLE[group]:
        for name in entry.names():
            owner = entry.find()
            if isinstance(entry, Stored):
                # of objects: another name, which they do not have
                said = f"{entry.owner}: its objects have no absent"
                assert [*evolve(entry, attributes=("absent",)).lacking()] == [said]
                continue
            if inspect.isclass(owner) and issubclass(owner, Enum):
                # its members cannot be removed: another name, which nothing has
                assert [*evolve(entry, attributes=("absent",)).lacking()] == [f"{entry.owner}.absent is not there"]
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.delattr(owner, name)
                assert engine_internals.lacking(TABLE[group], "sglang") == [f"{entry.owner}.{name} is not there"]


def without(runner: Any, path: str) -> Any:
    """A copy of what a runner has, without one attribute."""
    partial_runner = SimpleNamespace()
    for other_path in RUNNER:
        if other_path == path:
            continue
        *owners, name = other_path.split(".")
        source, copy = runner, partial_runner
        for owner in owners:
            source = getattr(source, owner)
            vars(copy).setdefault(owner, SimpleNamespace())
            copy = getattr(copy, owner)
        setattr(copy, name, getattr(source, name))
    return partial_runner


@pytest.mark.parametrize("path", RUNNER)
def test_an_attribute_that_the_runner_lacks_is_refused_by_name(runner: Any, path: str) -> None:
    with pytest.raises(RefusedError) as caught:
        internals.check("0.5.99", without(runner, path))

    assert str(caught.value) == (
        "dsv4attn-sglang: SGLang 0.5.99: expected all names of SGLang that dsv4attn-sglang replaces, calls, writes or "
        "reads, got "
        f"SimpleNamespace: the runner of the model has no {path} -> install sglang==0.5.23, or a dsv4attn-sglang that "
        "was tested with SGLang 0.5.99, or set DSV4ATTN_SGLANG=0 to run SGLang's own attention"
    )


def test_functions_of_other_arguments_are_refused_by_name(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.kernels.ops.attention import flash_mla_interface

    monkeypatch.setattr(flash_mla_interface, "flash_mla_sparse_fwd", lambda q, keys, indices, sm_scale: None)  # noqa: ARG005
    monkeypatch.delattr(flash_mla_interface, "flash_mla_with_kvcache")

    with pytest.raises(RefusedError) as caught:
        internals.check_functions("0.5.99", functions.CUDA)

    module = flash_mla_interface.__name__
    assert f"got {module}.flash_mla_with_kvcache is not there; " in str(caught.value)
    assert f"{module}.flash_mla_sparse_fwd takes keys, which dsv4attn does not know; " in str(caught.value)
    assert f"{module}.flash_mla_sparse_fwd does not take kv -> install" in str(caught.value)


def test_an_sglang_that_builds_attention_elsewhere_is_said_in_the_log(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other models are served: nothing is raised."""
    import sglang
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    monkeypatch.setattr(hooks, "_registered", set())
    monkeypatch.delattr(attention_backend_setup, "build_attention_backends")
    with caplog.at_level(logging.ERROR, "dsv4attn_sglang"):
        hooks._scheduler_is_made()
        monkeypatch.setattr(sglang, "__path__", [])
        monkeypatch.setattr(hooks, "SCHEDULER", "sglang.srt.schedulers.scheduler")
        hooks.watch_scheduler()

    said = [record.getMessage() for record in caplog.records]
    assert f"dsv4attn-sglang: not used: dsv4attn-sglang: {hooks.ATTENTION}: expected a function of SGLang" in said[0]
    assert said[1] == (
        "dsv4attn-sglang: not used: SGLang has no sglang.srt.schedulers.scheduler -> install sglang==0.5.23, which was "
        "tested"
    )
    assert hooks._registered == set()


# ---------------------------------------------------------------- the table has all that this package uses


def used() -> Iterator[tuple[str, str]]:
    """(module, name) of all that this package imports from SGLang."""
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "sglang":
                yield from ((node.module, imported.name) for imported in node.names)


def test_every_import_from_sglang_is_in_the_table() -> None:
    entries = [*TABLE["all"], *TABLE["indexer"], *TABLE["records"]]
    listed = {(entry.owner, name) for entry in entries for name in entry.names()}
    owners = {tuple(entry.owner.split(":")) for entry in entries if ":" in entry.owner}

    assert sorted(set(used()) - listed - owners) == []


def test_the_page_for_maintainers_has_the_names_of_this_wheel() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert written(page, ("dsv4attn_sglang",)) == page, "run `python integrations/internals_table.py`"
