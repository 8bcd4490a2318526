"""One problem, one cure: errors, `backends`, `explain` and `doctor` say the same; errors about names list the names."""

from __future__ import annotations

import pytest

from dsv4attn.core.contract import device
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, ConfigError, Dsv4AttnError, NoBackendError
from dsv4attn.plugins import BUILT_IN
from dsv4attn.selection import explain, load_backend, resolve
from tests.tools.cli.machine import Machine, without_triton
from tests.vendor_wheel import plugin

DECODE = Problem.of(ModelGeometry.preset("flash"))
LEAVE_OUT = "leave it out: DSV4ATTN_PLUGINS_DENY="
PROBLEMS = {
    "a plugin that cannot be imported": (
        "raise ImportError('libacme.so')",
        {},
        f"repair or remove it, or {LEAVE_OUT}acme",
    ),
    "a plugin without a hook": ("x = 1", {}, "mark dsv4attn_backends with dsv4attn.hookspecs.hookimpl"),
    "a hook that returns nonsense": (
        "from dsv4attn.hookspecs import hookimpl\n@hookimpl\ndef dsv4attn_backends(): return 3",
        {},
        f"repair or remove it, or {LEAVE_OUT}acme",
    ),
    "a plugin that is denied": (plugin(), {"DSV4ATTN_PLUGINS_DENY": "acme"}, "take it off that list to use it"),
    "a plugin that is not allowed": (plugin(), {"DSV4ATTN_PLUGINS_ALLOW": "bolt"}, "add it to that list to use it"),
    "a plugin for a newer minor contract": (
        plugin(api="1.7"),
        {},
        "install a newer dsv4attn, or a release of it for contract 1.0",
    ),
    "a plugin for a newer major contract": (plugin(api="2.0"), {}, "install a release of it for contract 1"),
    "a backend whose support raises": (
        plugin(support="raise KeyError('boom')"),
        {},
        f"report it to its authors, or {LEAVE_OUT}dsv4attn-acme",
    ),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_problem_has_the_same_cure_everywhere(machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    source, environ, cure = PROBLEMS[kind]
    machine.wheels.install("dsv4attn-acme", source)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Dsv4AttnError) as caught:
        resolve(DECODE, backend="acme")
    said = {"resolve": str(caught.value)}
    if "support" not in kind:
        with pytest.raises(Dsv4AttnError) as caught:
            load_backend("acme")
        said["load_backend"] = str(caught.value)
    for command in ("backends", "explain", "doctor"):
        said[command] = "\n".join(machine.run(command, width=400)[1])

    for where, text in said.items():
        assert cure in text, where


@pytest.mark.parametrize("name", ["hip", "xpu", "cuda"])
def test_a_missing_triton_is_cured_as_the_device_wants_it(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, name: str
) -> None:
    machine.install("acme", packages=("triton",))
    facts = DeviceFacts(name, "gfx942", "GPU", "2.11", None)
    lines = str(explain(DECODE, backend="acme", device=facts)).splitlines()
    cures = {line.partition(" -> ")[2] for line in lines if "TRITON " in line or "PACKAGE" in line}

    assert cures == {device.TRITON_SOURCES[name]}
    # as torch for ROCm brings it, under another name
    assert "PACKAGE" not in str(explain(DECODE, backend="acme", device=DeviceFacts(name, "x", "GPU", "2.11", "3.6")))


@pytest.mark.parametrize(
    "args",
    [
        ("run", "--backend", "rocm", "--layers", "swa", "--max-requests", "1"),
        ("conform", "rocm"),
        ("parity", "--backends", "reference,rocm"),
        ("bench", "decode", "--backends", "rocm"),
    ],
)
def test_a_missing_triton_is_one_verdict_in_every_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    without_triton(monkeypatch)
    code, lines = machine.run(*args, width=400)

    assert code == 2
    assert lines[0].startswith("Error: backend 'rocm' cannot run ")
    assert "-> pip install triton" in lines[0]
    assert "set TRITON_INTERPRET=1 before Python starts" in lines[0]
    assert "no Triton, needs Triton 3.6 or newer" in " ".join(lines)
    assert len(lines) <= 5
    with pytest.raises(NoBackendError, match=r"^backend 'rocm' cannot run here: TRITON  no Triton, needs Triton 3\.6"):
        load_backend("rocm")


@pytest.mark.parametrize("api", ["1.7", "2.0"])
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("conform", "acme"), 2),
        (("explain", "--backend", "acme"), 1),
        (("run", "--backend", "acme"), 2),
        (("bench", "decode", "--backends", "acme"), 2),
        (("doctor",), 1),
        (("backends",), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_plugin_for_a_newer_contract_is_refused_by_every_command(
    machine: Machine, api: str, args: tuple[str, ...], code: int
) -> None:
    machine.install("acme", api=api)
    ended, lines = machine.run(*args, width=400)

    assert ended == code
    assert f"'acme' is written for contract {api}, this is 1.0" in " ".join(lines)


# names that exist


def test_an_unknown_option_of_a_backend_is_answered_with_those_there_are(machine: Machine) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"expected one of tuning, deterministic, projection, index_sums, got .*; did you mean 'tuning'\?$",
    ):
        load_backend("triton", tunings="sm_90")
    (machine.wheels.folder / "dsv4attn.toml").write_text("options.triton.tunings = 'sm_90'", encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=r"unknown option 'tunings'; did you mean .* \(known: tuning, deterministic, projection, index_sums\)",
    ):
        load_backend("triton")


NAMES = [
    (["run", "--bakend", "x"], "(options: --backend, --block-size, "),
    (["explain", "--pase", "x"], "--page-size, --phase, "),
    (
        ["bench", "decod"],
        "unknown measurement 'decod'; did you mean 'decode'? (known: compress, decode, gather, host, index, ",
    ),
    (["bench", "--cases", "flash"], "(known: flash_c128, flash_c4, flash_swa, pro_c128, pro_c4, v41_r1, v41_r2)"),
    (
        ["bench", "--peers", "flashmla"],
        "(known: deep_gemm, flash_mla, flashinfer, flashinfer_topk, sglang_topk, vllm, vllm_auto_topk, vllm_topk)",
    ),
    (["bench", "--backends", "reverence"], f"(known: {', '.join(sorted(BUILT_IN))})"),
    (["conform", "reference", "--filter", "sinkk"], "expected clauses (A1, A2, "),
    (["run", "--cache", "fp4"], "(known: bf16, fp32, fp8_ds_mla)"),
    (["explain", "--layer", "c5a"], "(known: c128a, c4a, swa)"),
]


@pytest.mark.parametrize(("args", "said"), NAMES, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_an_error_about_a_name_on_the_command_line_lists_the_names(
    machine: Machine, args: list[str], said: str
) -> None:
    code, lines = machine.run(*args)

    assert code == 2
    assert said in " ".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backends = 'x'", "'backends'; did you mean 'backend'? (known: backend, decode, options, plugins, prefill)"),
        ("plugins.allows = []", "'plugins.allows'; did you mean 'allow'? (known: allow, deny)"),
    ],
)
def test_an_unknown_key_is_answered_with_those_there_are(machine: Machine, text: str, said: str) -> None:
    (machine.wheels.folder / "dsv4attn.toml").write_text(text, encoding="utf-8")

    assert said in " ".join(machine.run("backends")[1])
