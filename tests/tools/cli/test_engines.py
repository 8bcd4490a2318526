"""`dsv4attn doctor` on engines: every state, from metadata on a temporary path. The faked engines raise if imported."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4attn.config import known_variables
from dsv4attn.integrations.engines import ENGINES, SGLANG, VLLM, Engine
from dsv4attn.tools.cli import engines
from dsv4attn.tools.cli.engines import STATES, EngineState
from tests.tools.cli.machine import Machine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
WHEELS = sorted(path.parents[1] for path in (ROOT / "integrations").glob("dsv4attn-*/dsv4attn_*/guard.py"))
"""Those that read versions of their engine, and state what they do with it."""
BY_WHEEL = {engine.wheel: engine for engine in ENGINES}
GUARD = """
    from dsv4attn.integrations.engines import {constant}, Guard, RefusedError


    class Refused(RefusedError):
        engine = {constant}


    GUARD = Guard(Refused, tested=("1.2.0", "1.3.0"))
"""
INTERNALS = """
    from dsv4attn.integrations.engine_internals import Called, Named, Stored, Written

    TABLE = {{
        "all": (Named("{name}.code", ("a", "b")), Called("{name}.code", "run", 2)),
        "v4": (Stored("{name}.code:C", ("x", "y", "z")), Written("{name}.code:C", ("w",))),
    }}
"""


class Place:
    """A folder on the path with engines and wheels, as an installer leaves them."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.folder = machine, machine.wheels.folder

    def distribution(self, name: str, version: str, entry_points: str = "", metadata: bytes | None = None) -> Path:
        """Metadata of a distribution."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        (info / "METADATA").write_bytes(text if metadata is None else metadata)
        (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
        importlib.invalidate_caches()
        return info

    def engine(self, engine: Engine, version: str = "1.3.0", metadata: bytes | None = None) -> None:
        """An engine that must not be imported."""
        self.module(engine.package, "raise SystemExit('imported')")
        self.distribution(engine.package, version, metadata=metadata)

    def module(self, name: str, source: str) -> None:
        """A package of one file."""
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "__init__.py").write_text(dedent(source), encoding="utf-8")
        self.machine.wheels.modules += [name, f"{name}.guard", f"{name}.internals"]

    def wheel(self, engine: Engine, guard: str = GUARD, *, point: str | None = None) -> Path:
        """The wheel of an engine. point: text of its entry points."""
        name = engine.wheel.replace("-", "_")
        self.module(name, "")
        source = guard.format(constant=engine.package.upper()) if guard == GUARD else guard
        (self.folder / name / "guard.py").write_text(dedent(source), encoding="utf-8")
        table = dedent(INTERNALS).format(name=engine.package)
        (self.folder / name / "internals.py").write_text(table, encoding="utf-8")
        usual = f"[{engine.group}]\ndsv4attn = {name}:register\n"
        return self.distribution(engine.wheel, "0.1.0", usual if point is None else point)

    def said(self, engine: Engine, **environ: str) -> dict[str, Any]:
        """What `doctor --json` says of an engine; it is a problem, or it is none."""
        code, values = self.machine.json("doctor", **environ)
        result: dict[str, Any]
        [result] = [one for one in values["engines"] if one["engine"] == engine.name]
        without_engine = result["state"] == "absent" and result["wheel_version"] is not None
        wrong = without_engine or result["state"] in ("broken", "refused")
        assert (code, len(values["problems"])) == ((1, 1) if wrong else (0, 0))
        if wrong:
            [problem] = values["problems"]
            assert f"{problem['what']} -> {problem['cure']}" == result["text"]
            assert problem["trace"] == result["traceback"]
        assert result["served"] is (result["state"] in ("active", "untested"))
        assert {VLLM.package, SGLANG.package}.isdisjoint(sys.modules)
        return result


@pytest.fixture
def place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in [*known_variables(), *engines.related()]:
        monkeypatch.delenv(name, raising=False)
    return Place(machine)


both = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.package)


@both
def test_a_wheel_tested_with_the_version_serves(place: Place, engine: Engine) -> None:
    place.engine(engine)
    place.wheel(engine)
    said = place.said(engine)

    assert said.pop("text") == (
        f"{engine.name} 1.3.0: serves DeepSeek-V4 on dsv4attn, {engine.scope}: "
        f"dsv4attn-{engine.package} 0.1.0 was tested with this version"
    )
    assert said == {
        "engine": engine.name,
        "package": engine.package,
        "wheel": engine.wheel,
        "state": "active",
        "why": f"{engine.wheel} 0.1.0 was tested with this version",
        "installed": True,
        "version": "1.3.0",
        "wheel_version": "0.1.0",
        "tested": ["1.2.0", "1.3.0"],
        "is_tested": True,
        "served": True,
        "scope": engine.scope,
        "cure": "",
        "traceback": "",
        "internals": [
            {"part": "all", "owner": f"{engine.package}.code", "use": "reads", "names": ["a", "b"]},
            {"part": "all", "owner": f"{engine.package}.code", "use": "calls", "names": ["run"]},
            {"part": "v4", "owner": f"{engine.package}.code:C", "use": "reads", "names": ["x", "y", "z"]},
            {"part": "v4", "owner": f"{engine.package}.code:C", "use": "writes", "names": ["w"]},
        ],
    }


@both
def test_without_an_engine_there_is_nothing_to_say(place: Place, engine: Engine) -> None:
    assert place.said(engine)["text"] == f"{engine.name}: not installed"

    place.wheel(engine)
    said = place.said(engine)

    assert said["text"] == (
        f"{engine.name}: not installed, but {engine.wheel} 0.1.0 is "
        f"-> install {engine.package}, or uninstall {engine.wheel}"
    )
    assert (said["state"], said["installed"], said["is_tested"]) == ("absent", False, None)
    assert said["wheel_version"] == "0.1.0"


@both
def test_an_engine_without_the_wheel_keeps_its_own_attention(place: Place, engine: Engine) -> None:
    place.engine(engine)
    said = place.said(engine)

    assert (said["state"], said["wheel_version"], said["is_tested"]) == ("no wheel", None, None)
    assert said["text"] == (
        f"{engine.name} 1.3.0: serves DeepSeek-V4 without dsv4attn: {engine.wheel} is not installed "
        f"-> to change that, install integrations/{engine.wheel} of dsv4attn's sources"
    )


@both
def test_a_wheel_that_is_switched_off_is_no_problem(place: Place, engine: Engine) -> None:
    place.engine(engine, "9.9")
    place.wheel(engine)
    said = place.said(engine, **{engine.switch: "0"})

    assert (said["state"], said["is_tested"]) == ("off", False)
    assert said["text"].endswith(f"{engine.switch}=0 switches {engine.wheel} 0.1.0 off -> unset {engine.switch}")


@pytest.mark.parametrize(
    ("engine", "value", "cure"),
    [
        (VLLM, "acme", "acme,dsv4attn"),
        # set and empty, vLLM loads no plugin; blanks are part of a name
        (VLLM, "", "dsv4attn"),
        (VLLM, "acme, dsv4attn", "acme,dsv4attn"),
        (VLLM, "acme,dsv4attn-vllm", "acme,dsv4attn-vllm,dsv4attn"),
        (SGLANG, "acme", "acme,dsv4attn"),
        (SGLANG, " , ", "dsv4attn"),
        (VLLM, "dsv4attn", None),
        (VLLM, "acme,dsv4attn", None),
        (SGLANG, "", None),
        (SGLANG, "acme , dsv4attn", None),
    ],
)
def test_the_engines_own_list_of_plugins_counts(place: Place, engine: Engine, value: str, cure: str | None) -> None:
    place.engine(engine)
    place.wheel(engine)
    said = place.said(engine, **{engine.allowed: value})

    assert said["state"] == ("active" if cure is None else "left out")
    if cure is not None:
        assert said["why"] == f"{engine.allowed}={value!r} leaves out 'dsv4attn', the plugin of {engine.wheel} 0.1.0"
        assert said["cure"] == f"{engine.allowed}={cure}"
        # the cure helps
        assert place.said(engine, **{engine.allowed: cure})["state"] == "active"
    assert place.machine.json("doctor", **{engine.allowed: value})[1]["environment"] == {engine.allowed: value}


@both
def test_an_untested_version_is_refused_unless_any_is_allowed(place: Place, engine: Engine) -> None:
    place.engine(engine, "1.4.0")
    place.wheel(engine)
    said = place.said(engine)

    assert (said["state"], said["is_tested"]) == ("refused", False)
    assert said["text"] == (
        f"{engine.name} 1.4.0: refuses to load DeepSeek-V4: {engine.wheel}: version of {engine.name}: expected 1.2.0 "
        f"or 1.3.0, got 1.4.0 -> install {engine.package}==1.3.0, set {engine.switch}_ANY_VERSION=1 to try this "
        f"version, or set {engine.switch}=0 to run {engine.name}'s own attention"
    )
    tried = place.said(engine, **{f"{engine.switch}_ANY_VERSION": "1"})
    assert (tried["state"], tried["is_tested"]) == ("untested", False)
    assert tried["why"] == (
        f"{engine.wheel} 0.1.0 was tested with 1.2.0 and 1.3.0 only; {engine.switch}_ANY_VERSION=1 lets it try this one"
    )
    assert tried["cure"] == f"if it fails, install {engine.package}==1.3.0"


@pytest.mark.parametrize(("version", "state"), [("1.2.0+cu129", "active"), ("1.2.0rc1", "refused")])
def test_a_local_version_is_the_version(place: Place, version: str, state: str) -> None:
    place.engine(VLLM, version)
    place.wheel(VLLM)

    assert place.said(VLLM)["state"] == state


# strange metadata


def test_a_source_tree_on_the_path_is_an_engine_and_a_folder_is_none(place: Place) -> None:
    (place.folder / "vllm").mkdir()
    place.wheel(VLLM)
    assert place.said(VLLM)["state"] == "absent"

    place.module("vllm", "raise SystemExit('imported')")
    importlib.invalidate_caches()
    said = place.said(VLLM)
    assert (said["state"], said["version"], said["is_tested"]) == ("refused", None, None)
    assert place.said(VLLM, DSV4ATTN_VLLM_ANY_VERSION="1")["text"].startswith("vLLM: serves DeepSeek-V4 on dsv4attn, ")


@pytest.mark.parametrize("metadata", [b"", b"Name: vllm\n", b"Name: vllm\nVersion:\n", b"Name: vllm\nVersion: \xff\n"])
def test_metadata_without_a_version_is_a_problem_of_the_engine(place: Place, metadata: bytes) -> None:
    place.engine(VLLM, metadata=metadata)
    assert place.said(VLLM)["state"] == "no wheel"

    place.wheel(VLLM)
    said = place.said(VLLM)
    assert (said["state"], said["version"], said["cure"]) == ("broken", None, "reinstall vllm")
    assert said["text"].startswith("vLLM: serves DeepSeek-V4 without dsv4attn: vLLM is broken: its metadata ")
    assert place.said(VLLM, DSV4ATTN_VLLM="0")["state"] == "off"


@pytest.mark.parametrize("name", ["DSV4Attn_vLLM", "dsv4attn.vllm"])
def test_names_are_compared_as_packaging_tools_do(place: Place, name: str) -> None:
    place.engine(VLLM)
    info = place.wheel(VLLM)
    info.rename(info.with_name(f"{name.replace('.', '_')}-0.1.0.dist-info"))
    importlib.invalidate_caches()

    assert place.said(VLLM)["state"] == "active"


BROKEN: list[tuple[dict[str, str], str]] = [
    # entry points that lead nowhere
    ({"point": ""}, "LookupError: it has no entry point in vllm.general_plugins"),
    (
        {"point": "[vllm.platform_plugins]\ndsv4attn = dsv4attn_vllm:register\n"},
        "LookupError: it has no entry point in ",
    ),
    ({"point": "[vllm.general_plugins]\ndsv4attn = dsv4attn_gone:register\n"}, "ModuleNotFoundError: No module named "),
    ({"point": "[vllm.general_plugins]\ndsv4attn = :\n"}, "AttributeError: "),
    # guards that cannot be asked
    ({"guard": "raise ImportError('libacme.so')"}, "ImportError: libacme.so"),
    ({"guard": "class Panic(BaseException): pass\nraise Panic('rust')"}, "Panic: rust"),
    ({"guard": "raise SystemExit(0)"}, "SystemExit: 0"),
    ({"guard": "x = 1"}, "AttributeError: module 'dsv4attn_vllm.guard' has no attribute 'GUARD'"),
    ({"guard": "GUARD = None"}, "AttributeError: "),
    ({"guard": "from dsv4attn.integrations.engines import Guard\nGUARD = Guard(None, tested=None)"}, "TypeError: "),
]


@pytest.mark.parametrize(("wheel", "said"), BROKEN)
def test_a_wheel_that_cannot_be_found_or_asked_is_broken(place: Place, wheel: dict[str, str], said: str) -> None:
    place.engine(VLLM)
    place.wheel(VLLM, **wheel)
    result = place.said(VLLM)

    assert (result["state"], result["cure"]) == ("broken", "reinstall dsv4attn-vllm, or uninstall it")
    assert result["why"].startswith(f"dsv4attn-vllm 0.1.0 is broken: {said}")
    assert said.partition(":")[0] in result["traceback"]


def test_entry_points_that_cannot_be_read_are_a_broken_wheel(place: Place) -> None:
    place.engine(SGLANG)
    info = place.wheel(SGLANG)
    (info / "entry_points.txt").write_bytes(b"[sglang.srt.plugins]\n\xff = x\n")
    result = place.said(SGLANG)

    assert result["state"] == "broken"
    assert "UnicodeDecodeError" in result["why"]


def test_an_interrupt_is_not_a_broken_wheel(place: Place) -> None:
    place.engine(VLLM)
    place.wheel(VLLM, "raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        engines.examine()


# text


@pytest.mark.parametrize("width", [80, 120])
def test_the_lines_are_folded_and_a_problem_has_its_cure_once(place: Place, width: int) -> None:
    for engine, version in ((VLLM, "1.4.0"), (SGLANG, "1.3.0")):
        place.engine(engine, version)
        place.wheel(engine)
    code, lines = place.machine.run("doctor", width=width)
    text = re.sub(r"\s+", " ", " ".join(lines))

    assert code == 1
    assert max(map(len, lines)) <= width
    assert " engines vLLM 1.4.0: refuses to load DeepSeek-V4: dsv4attn-vllm: version of vLLM: expected 1.2.0 or" in text
    assert "SGLang 1.3.0: serves DeepSeek-V4 on dsv4attn, on GPUs of NVIDIA and Intel, else refused: dsv4" in text
    assert text.count("-> install vllm==1.3.0") == 1


def test_the_page_on_engines_has_every_state_as_it_is(place: Place) -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (yes|no) \| .* \| ([01]) \|$", page, re.MULTILINE)

    assert sorted(name for name, _, _ in rows) == sorted(STATES)
    for name, served, code in rows:
        state = EngineState("vLLM", "vllm", "dsv4attn-vllm", name, "why")
        assert (served, code) == ("yes" if name in ("active", "untested") else "no", str(int(state.is_problem)))
    with pytest.raises(ValueError, match="state"):
        EngineState("vLLM", "vllm", "dsv4attn-vllm", "happy", "why")


# the wheels of this repository


SPEED: list[tuple[str, dict[str, str], str, str]] = [
    (
        "0.1.4",
        {},
        "active",
        "on dsv4attn, in every op that has a kernel of the wheel: dsv4attn-tokenspeed 0.1.0 was tes",
    ),
    (
        "0.1.4",
        {"DSV4ATTN_TOKENSPEED": "0"},
        "off",
        "DSV4ATTN_TOKENSPEED=0 switches dsv4attn-tokenspeed 0.1.0 off -> un",
    ),
    ("0.1.4", {"DSV4ATTN_TOKENSPEED": "off"}, "broken", "variable DSV4ATTN_TOKENSPEED: expected 0 or 1 -> correct it"),
    (
        "0.2.0",
        {},
        "broken",
        "without dsv4attn: dsv4attn-tokenspeed 0.1.0 was tested with 0.1.4 only -> install tokenspe",
    ),
    (
        "0.2.0",
        {"DSV4ATTN_TOKENSPEED_ANY_VERSION": "1"},
        "untested",
        "tested with 0.1.4 only; DSV4ATTN_TOKENSPEED_ANY_V",
    ),
]


@pytest.mark.parametrize(("version", "environ", "state", "text"), SPEED)
def test_the_wheel_for_tokenspeed_is_examined(
    place: Place, version: str, environ: dict[str, str], state: str, text: str
) -> None:
    assert [one["engine"] for one in place.machine.json("doctor")[1]["engines"]] == ["vLLM", "SGLang"]
    place.distribution("tokenspeed_kernel", version)
    place.module("tokenspeed_kernel", "raise SystemExit('imported')")
    place.module("dsv4attn_tokenspeed", "TESTED = '0.1.4'")
    place.distribution("dsv4attn-tokenspeed", "0.1.0")
    code, values = place.machine.json("doctor", **environ)

    assert values["engines"][2]["state"] == state
    assert text in values["engines"][2]["text"]
    assert code == (state == "broken")


def test_the_module_flash_mla_is_examined(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**environ: str) -> tuple[str, str]:
        importlib.invalidate_caches()
        found = place.machine.json("doctor", **environ)[1]["engines"][2]
        return found["state"], found["text"]

    place.distribution("dsv4attn-flash-mla", "0.1.0")
    state, text = said()
    assert state == "broken"
    assert "Python has not read its .pth file" in text
    assert said(DSV4ATTN_FLASH_MLA="0")[0] == "off"
    place.module("flash_mla", "raise SystemExit('imported')")
    place.distribution("flash_mla", "1.0.0")
    state, text = said()
    assert state == "left out"
    assert re.search(
        r"FlashMLA is installed too, and .* is not set: .*flash_mla.__init__.py is .* -> DSV4ATTN_FLA", text
    )
    (place.folder / "dsv4attn_flash_mla").mkdir()
    front = place.folder / "dsv4attn_flash_mla" / "front.py"
    front.write_text("raise SystemExit('imported')", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("flash_mla", front)
    finder = SimpleNamespace(find_spec=lambda name, *_: spec if name == "flash_mla" else None)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    state, text = said()
    assert state == "active"
    assert "on dsv4attn, in engines that import flash_mla: dsv4attn-flash-mla 0.1.0 offers the module" in text


@pytest.mark.parametrize("folder", WHEELS, ids=lambda path: path.name)
def test_the_real_guard_of_a_wheel_is_understood(place: Place, folder: Path) -> None:
    engine, project = BY_WHEEL[folder.name], tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    package = engine.wheel.replace("-", "_")
    guard = (folder / package / "guard.py").read_text(encoding="utf-8")
    tested = re.search(r'^GUARD = .*tested=\((?:"[^"]+", )*"([^"]+)",?\)', guard, re.MULTILINE)
    assert tested
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"][engine.group].items())
    place.engine(engine, tested[1])
    place.wheel(engine, guard, point=f"[{engine.group}]\n{points}")

    said = place.said(engine)
    assert said["state"] == "active"
    if engine is VLLM:
        assert said["text"] in re.sub(r"\s+", " ", (ROOT / "docs" / "engines.md").read_text(encoding="utf-8"))
    assert place.said(engine, **{engine.switch: "0"})["state"] == "off"
    refused = place.said(engine, **{engine.switch: "2"})
    assert refused["state"] == "refused"
    assert f"environment variable {engine.switch}: expected 0 or 1, got '2'" in refused["why"]
    info = place.folder / f"{engine.package}-{tested[1]}.dist-info"
    (info / "METADATA").write_text(f"Name: {engine.package}\nVersion: 9.9\n", encoding="utf-8")
    importlib.invalidate_caches()
    refused = place.said(engine)
    assert refused["state"] == "refused"
    assert f"{engine.switch}_ANY_VERSION=1" in refused["cure"]
    assert place.said(engine, **{f"{engine.switch}_ANY_VERSION": "1"})["state"] == "untested"


def test_every_wheel_of_this_repository_has_an_engine() -> None:
    assert {folder.name for folder in WHEELS} <= {*BY_WHEEL}
    assert WHEELS
    assert {f"{engine.switch}{end}" for engine in ENGINES for end in ("", "_ANY_VERSION")} <= {*known_variables()}
