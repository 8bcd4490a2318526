"""The template of a third party's backend, as a wheel that is installed with a broken and an old one (promise G8)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsv4attn import hookspecs
from dsv4attn.core.contract import backend as contract
from dsv4attn.plugins import PluginRegistry
from tests.examples.built_wheels import ACME, BROKEN, Place, install, renamed
from tests.vendor_wheel import VendorWheels

SOME = (
    "sink-matters-*,call-behind-*,lse-decode,moved-c4a-*,insert-skips,project-1-bf16,project-fp8-ocp-bytes,output-fp8,"
    "scratch-swa,stale-swa,compress-c4a-ocp,query-fp8,select-fp8,mhc-fused-bf16"
)
"""Cases of every area, few enough to be quick."""

SELECT = """
import json
from dsv4attn import ModelGeometry, Problem, select_backend
model = ModelGeometry.preset("flash")
backend = select_backend(*(Problem.of(model, kind, phase) for kind in model.kinds for phase in ("decode", "prefill")))
print(json.dumps({"name": backend.name, "tile_tokens": getattr(backend, "tile_tokens", None)}))
"""

STEP = """
import json
from dsv4attn.testing.case import Bench
from dsv4attn.testing.checks.attention import equals_oracle
from dsv4attn.testing.kit.random_step import step
measures = [equals_oracle(Bench(backend), step(kind, (300, 1), (0, 40))) for kind in ("swa", "c4a", "c128a")]
print(json.dumps([measure.fraction for measure in measures]))
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with installed wheels, by what is in them."""
    base = tmp_path_factory.mktemp("shop")
    twin = renamed(ACME, base / "dsv4attn-again", "dsv4attn-acme", "dsv4attn-again")
    results = {"acme": ACME, "broken": BROKEN, "twin": twin}
    for name, project in results.items():
        install(project, base / name, base)
    return {name: base / name for name in results}


@pytest.fixture
def clean(sites: dict[str, Path], tmp_path: Path) -> Place:
    """Acme alone."""
    return Place(tmp_path, (sites["acme"],))


@pytest.fixture
def mixed(sites: dict[str, Path], tmp_path: Path) -> Place:
    """The same with the broken wheel, which comes first."""
    return Place(tmp_path, (sites["broken"], sites["acme"]))


def chosen(place: Place, backend: str = "") -> dict[str, Any]:
    output: dict[str, Any] = json.loads(place.run("-c", SELECT, DSV4ATTN_BACKEND=backend).stdout)
    return output


# seen


@pytest.mark.matrix
def test_g8_a_wheel_with_one_entry_point_is_listed_and_a_broken_one_beside_it_too(mixed: Place) -> None:
    rows = {row["name"]: row for row in mixed.json("backends")["backends"]}

    assert rows["acme"] | {"reasons": []} == rows["acme"]
    assert (rows["acme"]["state"], rows["acme"]["distribution"]) == ("available", "dsv4attn-acme")
    assert (rows["acme"]["native"], rows["acme"]["runnable"]) == (False, True)
    assert (rows["broken"]["state"], rows["broken"]["distribution"]) == ("failed", "dsv4attn-broken")
    assert "ImportError: libbroken.so.3" in rows["broken"]["note"]


@pytest.mark.matrix
def test_g8_the_doctor_shows_the_broken_wheels_traceback_and_nothing_else(mixed: Place) -> None:
    output = mixed.json("doctor", code=1)

    (problem,) = output["problems"]
    assert "broken failed to load: ImportError: libbroken.so.3" in problem["what"]
    assert "DSV4ATTN_PLUGINS_DENY=broken" in problem["cure"]
    assert problem["trace"].startswith("Traceback")
    assert re.search(r'dsv4attn_broken.__init__.py", line \d+', problem["trace"])


@pytest.mark.matrix
def test_g8_without_the_broken_wheel_the_doctor_finds_nothing(clean: Place) -> None:
    assert clean.json("doctor")["problems"] == []


@pytest.mark.matrix
def test_g8_denying_the_broken_wheel_is_a_cure(mixed: Place) -> None:
    assert mixed.json("doctor", DSV4ATTN_PLUGINS_DENY="broken")["problems"] == []


def test_the_descriptor_imports_neither_torch_nor_the_kernels(clean: Place) -> None:
    output = clean.run("-c", "import sys, dsv4attn_acme; print(*sys.modules)", fresh=True).stdout.split()

    assert "dsv4attn_acme.support" in output
    assert {"torch", "triton", "dsv4attn_acme.launch", "dsv4attn_acme.kernels"}.isdisjoint(output)


def test_a_problem_it_cannot_run_is_refused_with_every_reason_and_a_cure(clean: Place) -> None:
    arguments = ("explain", "--device", "cpu", "--backend", "acme", "--heads", "6", "--dtype", "float32")
    candidates = clean.json(*arguments, code=1)["candidates"]
    reasons = next(row for row in candidates if row["name"] == "acme")["reasons"]

    assert [reason["code"] for reason in reasons] == ["HEADS", "LAYOUT", "LAYOUT"]
    assert all(reason["cure"] for reason in reasons)


# selected


def test_g8_a_variable_selects_it(mixed: Place) -> None:
    assert chosen(mixed, "acme") == {"name": "acme", "tile_tokens": 64}


def test_g8_the_configuration_file_selects_it_and_its_option_reaches_the_factory(mixed: Place) -> None:
    text = 'backend = "acme"\n\n[options.acme]\ntile_tokens = 24\n'
    (mixed.folder / "dsv4attn.toml").write_text(text, encoding="utf-8")

    assert chosen(mixed) == {"name": "acme", "tile_tokens": 24}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tile_token = 24", "unknown option 'tile_token'; did you mean 'tile_tokens'?"),
        ('tile_tokens = "many"', "expected a number"),
    ],
)
def test_g8_an_option_it_does_not_take_names_the_file(mixed: Place, line: str, said: str) -> None:
    (mixed.folder / "dsv4attn.toml").write_text(f'backend = "acme"\n[options.acme]\n{line}\n', encoding="utf-8")
    error = mixed.run("-c", SELECT, code=1).stderr

    assert said in error
    assert "dsv4attn.toml" in error


def test_g8_nobody_asked_for_it_so_it_is_not_chosen_on_a_cpu(mixed: Place) -> None:
    assert chosen(mixed)["name"] == "reference"


def test_g8_two_vendors_work_in_one_process(mixed: Place) -> None:
    done = mixed.run("-c", SELECT + STEP, DSV4ATTN_BACKEND="decode=acme,prefill=reference")
    output, fractions = map(json.loads, done.stdout.splitlines())

    assert output["name"] == "acme+reference"
    assert len(fractions) == 3
    assert max(fractions) <= 1


def test_g8_asking_for_the_broken_one_is_an_error_that_says_why(mixed: Place) -> None:
    error = mixed.run("-c", SELECT, code=1, DSV4ATTN_BACKEND="broken").stderr

    assert "NoBackendError: backend 'broken' cannot be used: failed to load: ImportError: libbroken.so.3" in error
    assert "(dsv4attn-broken 0.1)" in error
    assert "acme" in error


def test_g8_two_wheels_with_one_name_both_lose_it_and_are_both_named(sites: dict[str, Path], tmp_path: Path) -> None:
    place = Place(tmp_path, (sites["acme"], sites["twin"]))
    rows = [row for row in place.json("backends")["backends"] if row["name"] == "acme"]

    assert [(row["state"], row["distribution"]) for row in rows] == [
        ("failed", "dsv4attn-acme"),
        ("failed", "dsv4attn-again"),
    ]
    error = place.run("-c", SELECT, code=1, DSV4ATTN_BACKEND="acme").stderr
    assert "'acme' is claimed by plugin acme of dsv4attn-acme and by plugin acme of dsv4attn-again" in error


def without_broken(output: dict[str, Any]) -> dict[str, Any]:
    """The output of a command without the broken wheel and without times."""
    for key, name in (("backends", "name"), ("failures", "plugin")):
        if key in output:
            output[key] = [row for row in output[key] if row[name] != "broken"]
    for case in output.get("cases", ()):
        del case["seconds"]
    return {key: value for key, value in output.items() if key not in ("date", "seconds")}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "command",
    [
        ("backends",),
        ("explain", "--device", "sm_70"),
        ("explain", "--device", "cpu", "--backend", "acme"),
        ("conform", "acme", "--filter", "lse-decode,insert-skips"),
    ],
    ids=["backends", "elsewhere", "here", "conform"],
)
def test_g8_with_and_without_the_broken_wheel_everything_else_is_the_same(
    clean: Place, mixed: Place, command: tuple[str, ...]
) -> None:
    code = 1 if "sm_70" in command else 0
    alone, with_broken = clean.json(*command, code=code), mixed.json(*command, code=code)

    assert without_broken(alone) == without_broken(with_broken)


# certified


def test_g8_the_kit_certifies_it(mixed: Place) -> None:
    output = mixed.json("conform", "acme", "--filter", SOME, "--option", "tile_tokens=7")

    assert (output["backend"], output["distribution"], output["options"]) == (
        "acme",
        "dsv4attn-acme",
        {"tile_tokens": "7"},
    )
    assert output["counts"]["executed"] > 10
    assert output["counts"]["refused"] == output["counts"]["failed"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        ("(decode or insert) and call and not 1031", 10),
        # half a minute; the large cases, a minute more, are run on the reference by `tests/testing/test_conform.py`
        pytest.param(
            "not requests and not keys and not million and not 1031 and not long", 150, marks=pytest.mark.slow
        ),
    ],
    ids=["a part", "the whole kit"],
)
def test_g8_its_twelve_lines_of_test_run_the_kit(mixed: Place, chosen: str, least: int) -> None:
    # what a vendor has: the installed package, and a checkout with its settings and its test
    (mixed.folder / "tests").mkdir(exist_ok=True)
    for file in ("pyproject.toml", "tests/test_conformance.py"):
        (mixed.folder / file).write_text((ACME / file).read_text(encoding="utf-8"), encoding="utf-8")
    output = mixed.run("-m", "pytest", "-p", "no:cacheprovider", "-k", chosen).stdout
    lines = (mixed.folder / "tests" / "test_conformance.py").read_text(encoding="utf-8").split("\n")
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped|failed)", output.splitlines()[-1])}

    assert len([line for line in lines if line.strip()]) <= 12
    assert "dsv4attn: contract 1." in output
    assert counts["passed"] > least
    assert counts.get("skipped", 0) < 50
    assert "failed" not in counts


# versions


def test_g8_a_plugin_of_contract_1_0_keeps_working_when_hooks_gain_arguments(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    @hookspecs.hookspec
    def dsv4attn_backends(reason: str = "new") -> None: ...

    monkeypatch.setattr(hookspecs, "dsv4attn_backends", dsv4attn_backends)
    monkeypatch.setattr("dsv4attn.plugins._call", lambda hook: hook(reason="new"))
    PluginRegistry.load(entry_points=[])  # descriptors of the package, imported first, keep its version
    monkeypatch.setattr(contract, "API_VERSION", "1.9")
    monkeypatch.setattr("dsv4attn.plugins.API_VERSION", "1.9")
    with VendorWheels(sites["acme"]) as wheels:
        wheels.modules.append("dsv4attn_acme")
        registry = wheels.registry()

    assert registry.failures == ()
    assert registry.backends["acme"].info.api == "1.0"


def test_g8_a_plugin_of_contract_1_0_is_refused_by_contract_2_with_both_versions_named(
    sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4attn.plugins.API_VERSION", "2.0")
    with VendorWheels(sites["acme"]) as wheels:
        wheels.modules.append("dsv4attn_acme")
        (failure,) = (failure for failure in wheels.registry().failures if failure.distribution != "dsv4attn")

    assert "'acme' is written for contract 1.0, this is 2.0" in failure.error
