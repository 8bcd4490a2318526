"""What the wheels of engines share: the guard of versions, refusals, words of a variable, the log."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from dsv4attn.integrations import engines
from dsv4attn.integrations.engines import ENGINES, SGLANG, VLLM, Engine, Guard, OnceLog, RefusedError, parts_named

ROOT = Path(__file__).resolve().parents[2]


def guard_of(engine: Engine) -> Guard:
    """The guard of a wheel that was tested with two versions."""
    return Guard(type("Refused", (RefusedError,), {"engine": engine}), tested=("1.2.0", "1.3.0"))


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.package)
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Guard:
    for name in (request.param.switch, request.param.any_version):
        monkeypatch.delenv(name, raising=False)
    return guard_of(request.param)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_an_engine_imports_in_every_process_loads_neither_torch_nor_the_engine(engine: str) -> None:
    code = (
        f"import sys, dsv4attn_{engine}, dsv4attn_{engine}.guard, dsv4attn_{engine}.internals; "
        "print(*{name.partition('.')[0] for name in sys.modules} & {'torch', 'sglang', 'vllm', 'triton', 'numpy'})"
    )
    path = f"{ROOT}:{ROOT / 'integrations' / f'dsv4attn-{engine}'}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == ""


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0", "1.3.0+cu130"])
def test_tested_versions_are_served_whatever_their_local_part(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(engines, "version", lambda _: version)

    assert guard.check() == version


def test_another_version_is_refused_by_name_with_the_variable_that_overrides(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = guard.engine
    monkeypatch.setattr(engines, "version", lambda _: "1.4.0+cu130")

    with pytest.raises(guard.refused) as caught:
        guard.check()
    assert str(caught.value) == (
        f"{engine.wheel}: version of {engine.name}: expected 1.2.0 or 1.3.0, got 1.4.0+cu130 -> "
        f"install {engine.package}==1.3.0, set {engine.any_version}=1 to try this version, "
        f"or set {engine.switch}=0 to run {engine.name}'s own attention"
    )
    monkeypatch.setenv(engine.any_version, "1")
    assert guard.check() == "1.4.0+cu130"


@pytest.mark.parametrize(("engine", "words"), [(VLLM, "a vLLM without version"), (SGLANG, "an SGLang without version")])
@pytest.mark.parametrize("metadata", ["missing", "without version"])
def test_an_engine_without_metadata_or_version_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, words: str, metadata: str
) -> None:
    def version(name: str) -> None:
        if metadata == "missing":
            raise PackageNotFoundError(name)

    monkeypatch.setattr(engines, "version", version)
    monkeypatch.delenv(engine.any_version, raising=False)
    with pytest.raises(RefusedError, match=f"got {words} -> install"):
        guard_of(engine).check()
    monkeypatch.setenv(engine.any_version, "1")
    assert guard_of(engine).check() == words


@pytest.mark.parametrize("name", ["switch", "any_version"])
def test_a_variable_that_is_neither_0_nor_1_is_refused_by_name(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    variable = getattr(guard.engine, name)
    monkeypatch.setenv(variable, "yes")
    monkeypatch.setattr(engines, "version", lambda _: "0.1")

    assert not guard.is_off()
    with pytest.raises(RefusedError, match=f"environment variable {variable}: expected 0 or 1, got 'yes' -> correct"):
        guard.check()


def test_the_switch_is_off_at_0_alone(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not guard.is_off()
    for text, is_off in ((" 0 ", True), ("1", False), ("", False)):
        monkeypatch.setenv(guard.engine.switch, text)
        assert guard.is_off() is is_off


def test_missing_names_are_refused_together(guard: Guard) -> None:
    guard.refuse_missing("1.3.0", [])
    with pytest.raises(
        RefusedError, match=r"reads, got a is not there; b is not there -> install .*==1.3.0, or a dsv4"
    ):
        guard.refuse_missing("1.4.0", ["a is not there", "b is not there"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", None),
        (" ", None),
        ("AUTO,", None),
        ("all", {"one", "two"}),
        ("none", set()),
        (" Two , ", {"two"}),
    ],
)
def test_words_of_a_variable(monkeypatch: pytest.MonkeyPatch, text: str, parts: set[str] | None) -> None:
    monkeypatch.setenv("PARTS", text)

    assert parts_named("PARTS", ("one", "two"), RefusedError) == parts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("twos", "got 'twos' -> write two, or set DSV4ATTN_VLLM=0"),
        ("two,all", "got 'all' -> correct it"),
        ("1", "expected auto, all, none, or some of one, two, got '1'"),
    ],
)
def test_another_word_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setenv("PARTS", text)

    with pytest.raises(RefusedError, match="environment variable PARTS: ") as caught:
        parts_named("PARTS", ("one", "two"), guard_of(VLLM).refused)
    assert said in str(caught.value)


def test_a_line_of_the_log_is_said_once_and_by_the_name_of_the_wheel(caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(SGLANG, "an.engine.dsv4attn")

    with caplog.at_level(logging.INFO, "an.engine.dsv4attn"):
        for _ in range(2):
            log.info("decode runs on %s", "triton")
            log.warning("not used")
        log.info("decode runs on %s", "sm90")

    assert [(record.levelname, record.getMessage(), record.filename) for record in caplog.records] == [
        ("INFO", "dsv4attn-sglang: decode runs on triton", "test_engines.py"),
        ("WARNING", "dsv4attn-sglang: not used", "test_engines.py"),
        ("INFO", "dsv4attn-sglang: decode runs on sm90", "test_engines.py"),
    ]


def test_lines_of_another_logger_go_where_those_of_the_wheel_go(caplog: pytest.LogCaptureFixture) -> None:
    """An engine shows INFO of its own loggers alone."""
    log, other = OnceLog(VLLM, "engine.adopted.dsv4attn"), logging.getLogger("a.warm.backend")
    logging.getLogger("engine.adopted").setLevel(logging.INFO)
    other.info("not seen")

    log.adopt("a.warm.backend")
    other.info("sm90 is warm")

    assert [record.getMessage() for record in caplog.records] == ["sm90 is warm"]
    logging.getLogger("a.kept").addHandler(logging.NullHandler())
    log.adopt("a.kept")
    assert logging.getLogger("a.kept").parent is not log.logger
