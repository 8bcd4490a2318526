"""`dsv4attn explain`: the decision about any problem on any device."""

from __future__ import annotations

import pytest

from dsv4attn.config import Settings
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.plugins import BUILT_IN
from dsv4attn.selection import explain
from dsv4attn.tools.cli import explain as command
from tests.backends.built_in import triton_backends
from tests.tools.cli.machine import Machine, device_of_no_backend


def test_g9_any_device_can_be_asked_about(machine: Machine) -> None:
    code, values = machine.json("explain", "--device", "sm120", "--heads", "64", "--topk", "1152")

    assert code == 0
    assert (values["chosen"], values["device"]["arch"], values["device"]["present"]) == ("sm120", "sm_120", False)
    assert values["verdict"] == "sm120: the vendor backend of 2 native to sm_120"
    assert "topk=1152" in values["problem"]
    [reference] = [c for c in values["candidates"] if c["name"] == "reference"]
    assert (reference["state"], reference["reasons"]) == ("not native", [])
    assert "ask for it by name" in reference["note"]


def test_wide_windows_may_change_the_kernel_and_narrow_ones_are_refused(machine: Machine) -> None:
    for layer, expected in (("swa", "multiplies in fp8"), ("c4a", "our kernel, in bf16: WINDOW 192")):
        _, values = machine.json("explain", "--device", "sm120", "--layer", layer, "--window-columns", "192")
        [sm120] = [c for c in values["candidates"] if c["name"] == "sm120"]
        assert expected in sm120["ways"][0]
    code, values = machine.json("explain", "--window-columns", "5")

    assert code == 2
    assert "window_columns: expected at least the 128 of the window, or 0, got 5" in values["error"]["message"]


def test_on_this_machine_something_is_chosen(machine: Machine) -> None:
    code, values = machine.json("explain")

    assert (code, values["chosen"], values["phase"]) == (0, "reference", "decode")
    assert values["request"] == {"value": "auto", "source": "default"}
    assert values["device"]["present"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--phase", "prefill", "--layer", "swa", "--page-size", "16"], "prefill  swa  heads=64  "),
        (["--layer", "c128a", "--compressed-page-size", "4"], "pages=64+4  "),
        (["--model", "pro", "--heads", "3"], "decode  c4a  heads=3  "),
        (["--model", "pro"], "topk=1024  "),
        (["--dtype", "float32", "--query-len", "4"], "kv=float32  q=bfloat16  query_len=4"),
        (["--lse", "--query-len", "2"], "query_len=2  lse"),
        (
            ["--layer", "c128a", "--max-model-len", "65536", "--q-dtype", "float32"],
            "topk=512  pages=64+2  kv=e4m3fn  q=float32",
        ),
        (["--no-sink"], "no sink"),
        (["--window-columns", "192", "--query-len", "5"], "query_len=5  window_columns=192"),
    ],
)
def test_every_part_of_a_problem_can_be_said(machine: Machine, options: list[str], expected: str) -> None:
    code, values = machine.json("explain", *options)

    assert code == 0
    assert expected in values["problem"]


def test_capture_reaches_the_support_answer(machine: Machine) -> None:
    code, values = machine.json("explain", "--capture")

    assert (code, values["chosen"]) == (1, None)
    [reference] = [c for c in values["candidates"] if c["name"] == "reference"]
    assert [reason["code"] for reason in reference["reasons"]] == ["CAPTURE"]


def test_determinism_is_shown_and_a_setting_against_it_is_an_error(machine: Machine) -> None:
    code, values = machine.json("explain", "--deterministic")
    [reference] = [c for c in values["candidates"] if c["name"] == "reference"]
    assert (code, reference["ways"]) == (0, ["built with deterministic=true, which the problem asks for"])

    (machine.wheels.folder / "dsv4attn.toml").write_text("options.reference.deterministic = false", encoding="utf-8")
    code, values = machine.json("explain", "--deterministic")
    assert (code, values["chosen"]) == (1, None)
    [reference] = [c for c in values["candidates"] if c["name"] == "reference"]
    assert [reason["code"] for reason in reference["reasons"]] == ["DETERMINISTIC"]
    assert machine.json("explain")[0] == 0


def test_options_of_the_settings_are_shown_and_notes_say_what_exact_sums_change() -> None:
    problem = Problem.of(ModelGeometry.preset("flash"), "c4a", "decode")
    settings = Settings(options={"sm90": {"index_sums": "exact", "deterministic": False}})

    def lines(device: str) -> list[str]:
        selection = explain(problem, device=DeviceFacts.named(device), settings=settings)
        [chosen] = [candidate for candidate in selection.trace if candidate.state == "chosen"]
        return chosen.lines[1:]

    hopper, blackwell = lines("sm_90"), lines("sm_100")
    assert hopper[0] == 'built with index_sums="exact", deterministic=false, by options.sm90 in the settings'
    assert hopper[-1].endswith("index_sums=fp8; in two steps otherwise")
    assert hopper[3] == blackwell[1]
    assert hopper[3].startswith("index_sums=exact would multiply e4m3 codes in 16 bits")
    assert lines("sm_80") == ["index scores: codes are decoded to fp16, or bf16, for the matrix unit"]


def test_who_runs_the_parts_around_attention_is_in_the_answer(machine: Machine) -> None:
    for layer, parts in (("swa", []), ("c128a", ["compressor"]), ("c4a", ["compressor", "indexer", "selection"])):
        _, values = machine.json("explain", "--layer", layer, "--deterministic")

        assert values["layer_parts"] == dict.fromkeys([*parts, "hyper_connections"], "reference")


def test_a_backend_can_be_asked_for(machine: Machine) -> None:
    machine.install("acme", native=("sm_999",))

    assert machine.json("explain", "--backend", "acme")[1]["chosen"] == "acme"
    assert machine.json("explain", "--device", "sm_999")[1]["chosen"] == "acme"
    assert machine.json("explain", "--backend", "prefill=acme")[1]["chosen"] == "reference"
    assert machine.json("explain", DSV4ATTN_BACKEND="acme")[1]["request"]["source"] == (
        "environment variable DSV4ATTN_BACKEND"
    )


@pytest.mark.parametrize("name", ["acme_1", "ACME_1", "acme_24"])
def test_a_device_that_a_plugin_is_native_to_can_be_asked_about(machine: Machine, name: str) -> None:
    machine.install("acme", native=("acme_1", "acme_2*"))
    code, values = machine.json("explain", "--device", name)

    assert (code, values["chosen"], values["assumed"]) == (0, "acme", "")
    assert values["verdict"] == f"acme: the only backend native to {name.lower()} that can run this call"
    assert (values["device"]["kind"], values["device"]["arch"]) == (name.lower(), name.lower())
    assert (values["device"]["name"], values["device"]["present"]) == ("of dsv4attn-acme 0.2", False)


def test_names_of_the_table_stay_what_they_are_if_a_plugin_is_native_to_them(machine: Machine) -> None:
    machine.install("acme", native=("sm_90", "gfx*", "xpu", "h200", "*"))

    assert machine.json("explain", "--device", "h200")[1]["device"]["name"] == "NVIDIA H100 or H200"
    code, lines = machine.run("explain", "--device", "acme_9", width=400)
    assert code == 2
    assert "devices of installed plugins" not in " ".join(lines)


def test_an_unknown_device_is_answered_with_those_of_plugins_too(machine: Machine) -> None:
    machine.install("acme", native=("acme_1", "acme_2*"))
    code, lines = machine.run("explain", "--device", "acme_3", width=2000)
    said = " ".join(lines)

    assert code == 2
    assert said.startswith("Error: unknown device 'acme_3'; did you mean 'acme_1'? (known: h200, sm_90, ")
    assert max(map(len, lines)) <= 140
    assert "devices of installed plugins: acme_1 (dsv4attn-acme 0.2), acme_2* (dsv4attn-acme 0.2)" in said
    # a plugin that is left out brings no device
    assert "acme_1" not in " ".join(machine.run("explain", "--device", "x", DSV4ATTN_PLUGINS_DENY="acme")[1])


def test_g9_a_misspelt_backend_is_answered_with_the_right_one(machine: Machine) -> None:
    code, values = machine.json("explain", DSV4ATTN_BACKEND="refernz")

    assert (code, values["chosen"]) == (1, None)
    assert values["verdict"].endswith("no backend has this name; did you mean 'reference'?")


def test_the_trace_is_that_of_the_exception(machine: Machine) -> None:
    machine.install("acme", support="return [Reason('HEADS', 64, '[128]', 'pad q')]")
    machine.wheels.install("dsv4attn-lib", "raise ImportError('libacme.so')")
    _, lines = machine.run("explain", "--backend", "acme", width=400)
    problem = Problem.of(ModelGeometry.preset("flash"))

    assert lines == str(explain(problem, backend="acme", device=DeviceFacts.here("cpu"))).splitlines()


def test_a_broken_pyproject_of_another_project_is_mentioned_and_changes_nothing(machine: Machine) -> None:
    (machine.wheels.folder / "pyproject.toml").write_text("[project]\nname = = 1", encoding="utf-8")
    code, values = machine.json("explain")
    path = machine.wheels.folder / "pyproject.toml"

    assert (code, values["chosen"]) == (0, "reference")
    assert values["ignored"] == [f"{path}:2: not valid TOML: Invalid value (at line 2, column 8)"]
    code, lines = machine.run("explain", width=400)
    assert code == 0
    assert lines[-1].split(maxsplit=1) == ["ignored", *values["ignored"]]


@pytest.mark.parametrize("width", [80, 120])
def test_a_trace_is_folded_under_itself(machine: Machine, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.wheels.install("dsv4attn-lib", "raise ImportError('libacme.so: ' + 'cannot open shared object file ' * 9)")
    code, lines = machine.run("explain", "--device", device_of_no_backend(monkeypatch), width=width)

    assert code == 1
    assert max(map(len, lines)) <= width
    assert lines[0] == "no backend native to abacus can run this call -> ask for reference by name"
    assert {line[:13] for line in lines[1:] if line.startswith("   ")} == {" " * 13}
    titles = [line[:13] for line in lines[1:] if not line.startswith("   ")]
    assert sorted(titles) == sorted(f"  {title:11}" for title in ("call", "device", "request", *BUILT_IN, "lib"))


V41 = ("--model", "v4.1-flash")
REFUSED = [
    (["--device", "xpuu"], "unknown device 'xpuu'; did you mean 'xpu'?"),
    (["--layer", "c5a"], "unknown layer kind 'c5a'"),
    (["--model", "flsh"], "unknown model 'flsh'"),
    (["--model", "no/config.json"], "no such file"),
    (["--heads", "0"], "0 is not in the range"),
    (["--heads", "1e3"], "'1e3' is not a valid whole number"),
    (["--dtype", "fp4"], "'fp4' is not one of"),
    (["--phase", "both"], "'both' is not one of"),
    (["--q-dtype", "float16"], "'float16' is not one of"),
    (["--layer", "swa", "--topk", "512"], "topk: expected 0 on a window-only layer"),
    (["--backend", "refernz"], "unknown backend 'refernz'; did you mean 'reference'?"),
    (["--backend", "decode=reference,prefill=foo"], "unknown backend 'foo'"),
    (["--backend", "decode="], "argument backend: expected NAME or"),
    # a suggestion is a close name of the same family
    (["--device", "v100"], "'v100' (known: h200, sm_90, mi300x, xpu, cpu, ...: `dsv4attn explain --help` lists all)"),
    (["--device", "tpu"], "unknown device 'tpu' (known: "),
    (["--device", "rx580"], "unknown device 'rx580' (known: "),
    (["--device", "a"], "unknown device 'a' (known: "),
    (["--device", "rtx4060"], "did you mean 'rtx4090'? (known: "),
    (["--device", "h2O0"], "did you mean 'h200'? (known: "),
    (["--device", "xpuu"], "did you mean 'xpu'? (known: "),
    (["--device", "v100"], "any sm_* and gfx* is taken too"),
    (["--device", "nvidia"], "of NVIDIA, name a card (h200, rtx4090) or an architecture (sm_90): any sm_* is taken"),
    (["--device", "amd"], "of AMD, name a card (mi300x, rx9070)"),
    (["--device", "intel"], "of Intel, name xpu"),
    # layers of V4.1 that do not exist
    ([*V41], "--ratio: expected one of [1, 2], the ratios of the c4a layers of deepseek-v4.1-flash, got none"),
    ([*V41, "--ratio", "4"], "--ratio: expected one of [0, 1, 2], the ratios of deepseek-v4.1-flash, got 4"),
    ([*V41, "--ratio", "1", "--layer", "swa"], "--ratio 1 is not of swa layers of deepseek-v4.1-flash"),
    ([*V41, "--ratio", "1", "--records", "528/288", "--dtype", "bfloat16"], "--records 528/288 say the type"),
    ([*V41, "--ratio", "1", "--records", "288/288"], "'288/288' is not one of"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_bad_input_is_code_2(machine: Machine, options: list[str], said: str) -> None:
    code, values = machine.json("explain", *options)

    assert code == 2
    assert said in values["error"]["message"]


def test_a_device_that_is_here_is_not_only_described(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceFacts("cuda", "sm_90", "H200", "2.13", None)
    monkeypatch.setattr(DeviceFacts, "all_here", lambda: [real])

    assert command._device("sm90") is real
    assert not command._device("sm120").present


@pytest.mark.parametrize(("name", "unknown"), [("sm_999", True), ("gfx1234", True), ("sm_90", False), ("h200", False)])
def test_an_architecture_that_nothing_knows_is_said_to_be_unknown(machine: Machine, name: str, unknown: bool) -> None:
    _, values = machine.json("explain", "--device", name)
    lines = " ".join(machine.run("explain", "--device", name, width=200)[1])
    said = "unknown architecture, served by the generic row of each backend"

    assert values["assumed"] == (said if unknown else "")
    assert (said in lines) is unknown


@pytest.mark.parametrize(("name", "arch"), [("sm90a", "sm_90"), ("sm_120a", "sm_120"), ("SM_100f", "sm_100")])
def test_what_compilers_call_an_architecture_with_its_features_is_the_architecture(
    machine: Machine, name: str, arch: str
) -> None:
    _, values = machine.json("explain", "--device", name)

    assert (values["device"]["arch"], values["assumed"]) == (arch, "")


def test_a_device_that_a_backend_does_not_run_on_is_one_reason_without_patterns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, values = machine.json("explain", "--device", device_of_no_backend(monkeypatch))
    reasons = {c["name"]: [reason["text"] for reason in c["reasons"]] for c in values["candidates"]}

    assert reasons["sm120"] == ["abacus, needs cuda or hip or xpu or cpu or sm_12x"]
    assert {len(reasons[name]) for name in triton_backends()} == {1}


def test_a_request_for_one_phase_is_shown_as_it_was_typed(machine: Machine) -> None:
    _, values = machine.json("explain", "--backend", "decode=reference")

    assert values["request"] == {"value": "reference", "source": "argument decode=reference"}


@pytest.mark.parametrize("device", ["h200", "a100", "mi300x", "b580", "rtx5090"])
@pytest.mark.parametrize("records", ["584/584", "528/528", "528/288"])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_v41_layers_are_asked_about_by_ratio_and_records(
    machine: Machine, device: str, records: str, ratio: int
) -> None:
    code, values = machine.json("explain", *V41, "--device", device, "--ratio", str(ratio), "--records", records)
    entries = "+v41_fp4 e2m1" if ratio and records == "528/288" else ""
    window = "e4m3fn" if records == "584/584" else "v41_fp8 e4m3fn"

    assert code == 0
    assert f"decode  {'c4a' if ratio else 'swa'}  " in values["problem"]
    assert f"compress_ratio={ratio or 1}  " in values["problem"]
    assert f"kv={window}{entries}  q=bfloat16  no q norm" in values["problem"]
    assert [c["name"] for c in values["candidates"] if c["state"] == "chosen"] == [values["chosen"]]
    parts = ["compressor", "indexer", "selection", "candidates"] if ratio else []
    assert values["layer_parts"] == dict.fromkeys([*parts, "hyper_connections"], values["chosen"])


def test_explain_says_which_kernel_reads_records_of_four_bits(machine: Machine) -> None:
    code, values = machine.json("explain", "--device", "h100", "--records", "384/384")

    assert code == 0
    assert "(448 e2m1 + 64 bf16)  window=128  compress_ratio=4  topk=512  pages=64+64  kv=v4_nvfp4 e2m1" in str(values)
    assert "the Gluon kernel for Hopper" in str(values)


def test_records_that_a_backend_does_not_read_are_its_reason(machine: Machine) -> None:
    refuses = "problem.compressed.layout != 'fp8_ds_mla'"
    reason = "Reason('LAYOUT', problem.compressed.layout, 'fp8_ds_mla')"
    machine.install("acme", native=("sm_999",), support=f"return [{reason}] if {refuses} else []")
    asked = ("explain", "--device", "sm_999", "--backend", "acme")

    assert machine.json(*asked)[0] == 0
    code, values = machine.json(*asked, "--records", "528/288")
    [acme] = [c for c in values["candidates"] if c["name"] == "acme"]
    actual = [reason["actual"].split(",")[0] for reason in acme["reasons"]]
    assert (code, actual) == (1, ["v41_fp4"])


def test_a_ratio_alone_names_the_kind(machine: Machine) -> None:
    assert "decode  c128a  " in machine.json("explain", "--ratio", "128")[1]["problem"]
    assert "decode  c4a  " in machine.json("explain")[1]["problem"]


def test_ops_of_the_reference_are_named(machine: Machine) -> None:
    machine.install("acme")
    ops = {"DSV4ATTN_REFERENCE_OPS": "attend, select_topk"}
    code, values = machine.json("explain", "--backend", "acme", **ops)

    assert (code, values["reference_ops"]) == (0, ["attend", "select_topk"])
    lines = machine.run("explain", "--backend", "acme", width=120, **ops)[1]
    assert "reference  computes attend, select_topk  (environment variable DSV4ATTN_REFERENCE_OPS)" in str(lines)
    assert machine.json("explain", "--backend", "acme")[1]["reference_ops"] == []
    code, values = machine.json("explain", DSV4ATTN_REFERENCE_OPS="atend")
    assert code == 2
    assert "unknown op 'atend'; did you mean 'attend'? (groups: all, attend, " in values["error"]["message"]
