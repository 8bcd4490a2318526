"""From the chosen descriptor to a backend: options, factories that fail, and two phases in one backend."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.backend import BackendInfo, Capabilities, IndexForm, KeyForm
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, BrokenBackendError, ConfigError, NoBackendError, UnknownNameError
from dsv4attn.plugins import BUILT_IN
from dsv4attn.selection import build, load_backend, select_backend
from tests.backends.built_in import triton_backends
from tests.forked_programs import run_forked
from tests.tools.cli.machine import device_of_no_backend
from tests.vendor_wheel import VendorWheels, plugin

FLASH = ModelGeometry.preset("flash")
DECODE = [Problem.of(FLASH, kind, "decode") for kind in FLASH.kinds]
PREFILL = [Problem.of(FLASH, kind, "prefill") for kind in FLASH.kinds]
FORMS: dict[str, Any] = {"decode_indices": "dense", "prefill_indices": "dense", "prefill_keys": "gathered"}

NO_BACKENDS = """

from dsv4attn.core.contract import Backend
from dsv4attn.backends.reference.launch import ReferenceBackend


class Half(ReferenceBackend):
    def __init__(self):
        self.capabilities = 3


class Unfinished(Backend):
    name = "acme"

    def decode(self, call): ...


class Alike:
    def __getattr__(self, name):
        return getattr(ReferenceBackend(), name)
"""


def configure(wheels: VendorWheels, text: str) -> Path:
    path = wheels.folder / "dsv4attn.toml"
    path.write_text(text, encoding="utf-8")
    return path


# one call for engines


def test_one_call_gives_an_engine_its_backend(wheels: VendorWheels) -> None:
    assert isinstance(select_backend(*DECODE, *PREFILL), ReferenceBackend)
    assert isinstance(select_backend(*DECODE), ReferenceBackend)
    assert isinstance(select_backend(PREFILL[0], device="cpu"), ReferenceBackend)


def test_two_phases_with_two_backends_are_one_backend(wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install("dsv4attn-acme", plugin(options=FORMS))
    configure(wheels, "[options.acme]\ndecode_indices = 'ragged'\n[options.reference]\nprefill_keys = 'paged'")
    pair = select_backend(*PREFILL, *DECODE, backend="decode=acme,prefill=reference")

    assert isinstance(pair, PhasedBackend)
    assert pair.capabilities == Capabilities(
        IndexForm.RAGGED, IndexForm.DENSE, KeyForm.PAGED, max_logits=True, empty_lse=True
    )
    monkeypatch.setenv("DSV4ATTN_BACKEND", "acme")
    assert isinstance(select_backend(*PREFILL, *DECODE), ReferenceBackend)


def test_a_phase_that_no_backend_runs_is_an_error_of_that_phase(wheels: VendorWheels) -> None:
    refuses = "return [Reason('PHASE', 'prefill', 'decode')] if problem.phase == 'prefill' else []"
    wheels.install("dsv4attn-acme", plugin(support=refuses))
    with pytest.raises(NoBackendError) as caught:
        select_backend(*DECODE, *PREFILL, backend="acme")

    assert "call       prefill" in str(caught.value)
    assert "acme       PHASE  prefill, needs decode" in str(caught.value)
    assert isinstance(select_backend(*DECODE, *PREFILL, backend="decode=acme"), PhasedBackend)


def test_a_machine_without_a_backend_is_an_error_before_any_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoBackendError, match=r"^no backend native to abacus can run this call -> ask for reference by name\n"
    ):
        select_backend(*DECODE, device=DeviceFacts.named(device_of_no_backend(monkeypatch)))


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"^problems: expected at least one, got none"):
        select_backend()


# options


def test_options_from_the_configuration_reach_the_factory(wheels: VendorWheels) -> None:
    configure(wheels, "[options.reference]\nprefill_keys = 'paged'")

    assert select_backend(*PREFILL).capabilities.prefill_keys is KeyForm.PAGED
    assert load_backend("reference").capabilities.prefill_keys is KeyForm.PAGED
    assert load_backend("reference", prefill_keys="gathered").capabilities.prefill_keys is KeyForm.GATHERED


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("prefil_keys = 'paged'", "unknown option 'prefil_keys'; did you mean 'prefill_keys'?"),
        ("prefill_keys = 'pagd'", "unknown prefill_keys form 'pagd'; did you mean 'paged'?"),
    ],
)
def test_a_wrong_option_in_the_configuration_names_the_file(wheels: VendorWheels, option: str, problem: str) -> None:
    path = configure(wheels, f"[options.reference]\n{option}")
    message = re.escape(f"options.reference in {path}: {problem}")
    with pytest.raises(ConfigError, match=f"^{message}"):
        select_backend(*DECODE)
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_backend()


def test_a_value_the_factory_cannot_take_is_an_argument_error(wheels: VendorWheels) -> None:
    source = plugin(factory="dsv4attn_acme:make", options={"tile": 4}) + "\n\ndef make(tile):\n    int('x')\n"
    wheels.install("dsv4attn-acme", source)

    with pytest.raises(
        ArgumentError, match=r"^options of backend acme: expected values it takes, got {'tile': 9} \(Val"
    ):
        load_backend("acme", tile=9)


# factories of other vendors


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("raise ImportError('libacme.so')", "ImportError: libacme.so"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise type('Panic', (BaseException,), {})('rust')", "Panic: rust"),
        ("int('x')", "ValueError: invalid literal"),
        ("return None", "it made NoneType, which lacks decode, dequantize_and_gather_k_cache, "),
        ("return make", "it made function, which lacks decode, "),
        ("return Half()", "it made Half, whose capabilities are int"),
        (
            "return Unfinished()",
            "it made Unfinished, which lacks dequantize_and_gather_k_cache, capabilities, inv_rope_o_proj, ",
        ),
        (
            "return Alike()",
            "it made Alike, which does not derive from Backend -> derive from dsv4attn.core.contract.Ba",
        ),
    ],
)
def test_g9_a_backend_that_cannot_be_made_is_broken(wheels: VendorWheels, factory: str, problem: str) -> None:
    source = plugin(factory="dsv4attn_acme:make") + NO_BACKENDS + f"\n\ndef make():\n    {factory}\n"
    wheels.install("dsv4attn-acme", source)

    with pytest.raises(BrokenBackendError) as caught:
        select_backend(*DECODE, backend="acme")
    assert str(caught.value).startswith(f"backend 'acme' is broken: dsv4attn_acme:make: {problem}")


@pytest.mark.parametrize("factory", ["no_such_module_at_all:make", "dsv4attn_acme:no_such_name"])
def test_an_implementation_that_is_not_there_is_broken_with_its_cause(wheels: VendorWheels, factory: str) -> None:
    wheels.install("dsv4attn-acme", plugin(factory=factory))

    with pytest.raises(BrokenBackendError, match=rf"^backend 'acme' is broken: {factory}: ") as caught:
        load_backend("acme")
    assert isinstance(caught.value.__cause__, (ImportError, AttributeError))


def test_a_missing_package_is_a_refusal_as_selection_words_it() -> None:
    info = BackendInfo(
        name="acme",
        api="1.0",
        factory="no_such_module_at_all:make",
        support=lambda _device, _problem: [],
        summary="",
        native=(),
        packages=("no-such-package",),
    )

    refusal = "PACKAGE  no-such-package is not installed, needs no-such-package -> pip install no-such-package"
    with pytest.raises(NoBackendError, match=rf"^backend 'acme' cannot run here: {refusal}$") as caught:
        build(info, {})
    assert type(caught.value) is NoBackendError
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_g6_a_backend_is_imported_after_it_was_chosen(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin(factory="no_such_module_at_all:make"))

    assert isinstance(select_backend(*DECODE, backend="reference"), ReferenceBackend)


def test_a_plugin_that_failed_is_not_loaded_by_name_either(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", "raise ImportError('libacme.so')")

    with pytest.raises(
        NoBackendError, match=r"^backend 'acme' cannot be used: failed to load: ImportError: libacme.so"
    ):
        load_backend("acme")


def test_the_error_of_an_unknown_name_lists_every_plugin_that_cannot_be_used(
    wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels.install("dsv4attn-acme", plugin("acme-2"))
    wheels.install("zinc-kernels", "raise ImportError('libzinc.so')")
    monkeypatch.setenv("DSV4ATTN_PLUGINS_DENY", "dsv4attn-acme")

    with pytest.raises(UnknownNameError) as caught:
        load_backend("acme-2")

    first, *others = str(caught.value).splitlines()
    assert first == f"unknown backend 'acme-2' (known: {', '.join(sorted(BUILT_IN))})"
    assert [line.partition(":")[0] for line in others] == [
        "  acme not loaded",
        "  kernels failed to load",
    ]


@pytest.fixture(scope="module")
def without_triton() -> dict[str, str]:
    """The traceback of loading each name in a process without Triton."""
    code = f"""
import json, sys, traceback
sys.modules["triton"] = None
from dsv4attn import load_backend
outcomes = dict.fromkeys({[*triton_backends()]!r}, "loaded")
for name in outcomes:
    try:
        load_backend(name)
    except Exception:
        outcomes[name] = traceback.format_exc()
print(json.dumps(outcomes))
"""
    done = run_forked(["-c", code])
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


@pytest.mark.parametrize("name", triton_backends())
def test_the_error_without_triton_says_how_to_install_it(name: str, without_triton: dict[str, str]) -> None:
    message = rf"NoBackendError: backend '{name}' cannot run here: TRITON  no Triton, needs Triton 3.6 or newer -> "
    assert re.search(message + "(pip install triton|reinstall torch)", without_triton[name]), without_triton[name]
    assert "BrokenBackendError" not in without_triton[name]


@pytest.mark.parametrize(("name", "table"), [("index_ops", "IndexOps"), ("rank_ops", "RankOps")])
def test_a_table_of_ops_that_is_none_is_refused(wheels: VendorWheels, name: str, table: str) -> None:
    backend = f"""

from dsv4attn.backends.reference.launch import ReferenceBackend


class Acme(ReferenceBackend):
    name = "acme"
    {name} = dict()
"""
    wheels.install("dsv4attn-acme", plugin(factory="dsv4attn_acme:Acme") + backend)

    with pytest.raises(BrokenBackendError, match=f"whose {name} are dict, not {table}"):
        load_backend("acme")


@pytest.mark.parametrize(
    ("declared", "layer_ops", "problem"),
    [
        (
            "()",
            "evolve(LayerOps(), select_topk=select)",
            "BackendInfo.layer_ops names none, and its layer_ops bring selection",
        ),
        ("('selection',)", "LayerOps()", "names selection, and its layer_ops bring none"),
        ("('selection',)", "evolve(LayerOps(), select_topk=select)", ""),
        ("('selection',)", "{'select_topk': select}", "whose layer_ops are dict, not LayerOps"),
    ],
)
def test_a_backend_brings_the_layer_ops_that_its_descriptor_names(
    wheels: VendorWheels, declared: str, layer_ops: str, problem: str
) -> None:
    backend = f"""

from dsv4attn.backends.reference.launch import ReferenceBackend
from attrs import evolve
from dsv4attn.core.contract import LayerOps


def select(*arguments):
    LayerOps().select_topk(*arguments)


class Acme(ReferenceBackend):
    name = "acme"

    def __init__(self):
        super().__init__()
        self.layer_ops = {layer_ops}
"""
    source = plugin(factory="dsv4attn_acme:Acme").replace("api=", f"layer_ops={declared}, api=") + backend
    wheels.install("dsv4attn-acme", source)

    if problem:
        with pytest.raises(BrokenBackendError, match=re.escape(problem)):
            load_backend("acme")
    else:
        assert load_backend("acme").name == "acme"
