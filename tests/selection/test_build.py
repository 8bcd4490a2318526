"""From a descriptor that has won to a backend: options, wrong types, and two phases in one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract import device
from dsv4attn.core.contract.backend import BackendInfo, Capabilities, IndexForm, KeyForm
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, BrokenBackendError, ConfigError, NoBackendError, UnknownNameError
from dsv4attn.plugins import BUILT_IN
from dsv4attn.selection import build, load_backend, select_backend
from tests.backends.built_in import triton_backends
from tests.tools.cli.machine import device_of_no_backend
from tests.vendor_wheel import Shelf, plugin

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


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    with Shelf(tmp_path) as made:
        yield made


def configure(shelf: Shelf, text: str) -> Path:
    path = shelf.folder / "dsv4attn.toml"
    path.write_text(text, encoding="utf-8")
    return path


# one call for engines


def test_one_call_gives_an_engine_its_backend(shelf: Shelf) -> None:
    assert isinstance(select_backend(*DECODE, *PREFILL), ReferenceBackend)
    assert isinstance(select_backend(*DECODE), ReferenceBackend)
    assert isinstance(select_backend(PREFILL[0], device="cpu"), ReferenceBackend)


def test_two_phases_with_two_backends_are_one_backend(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.install("dsv4attn-acme", plugin(options=FORMS))
    configure(shelf, "[options.acme]\ndecode_indices = 'ragged'\n[options.reference]\nprefill_keys = 'paged'")
    pair = select_backend(*PREFILL, *DECODE, backend="decode=acme,prefill=reference")

    assert isinstance(pair, PhasedBackend)
    assert pair.capabilities == Capabilities(
        IndexForm.RAGGED, IndexForm.DENSE, KeyForm.PAGED, max_logits=True, empty_lse=True
    )
    monkeypatch.setenv("DSV4ATTN_BACKEND", "acme")
    assert isinstance(select_backend(*PREFILL, *DECODE), ReferenceBackend)


def test_a_phase_that_nobody_runs_is_an_error_of_that_phase(shelf: Shelf) -> None:
    refuses = "return [Reason('PHASE', 'prefill', 'decode')] if problem.phase == 'prefill' else []"
    shelf.install("dsv4attn-acme", plugin(support=refuses))
    with pytest.raises(NoBackendError) as caught:
        select_backend(*DECODE, *PREFILL, backend="acme")

    assert "call       prefill" in str(caught.value)
    assert "acme       PHASE  prefill, needs decode" in str(caught.value)
    assert isinstance(select_backend(*DECODE, *PREFILL, backend="decode=acme"), PhasedBackend)


def test_a_machine_without_a_backend_is_told_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoBackendError, match=r"^no backend native to abacus can run this call -> ask for reference by name\n"
    ):
        select_backend(*DECODE, device=DeviceFacts.named(device_of_no_backend(monkeypatch)))


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"^problems: expected at least one, got none"):
        select_backend()


# options


def test_options_from_the_configuration_reach_the_factory(shelf: Shelf) -> None:
    configure(shelf, "[options.reference]\nprefill_keys = 'paged'")

    assert select_backend(*PREFILL).capabilities.prefill_keys is KeyForm.PAGED
    assert load_backend("reference").capabilities.prefill_keys is KeyForm.PAGED
    assert load_backend("reference", prefill_keys="gathered").capabilities.prefill_keys is KeyForm.GATHERED


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("prefil_keys = 'paged'", "unknown option 'prefil_keys'; did you mean 'prefill_keys'?"),
        ("prefill_keys = 'pagd'", "unknown prefill_keys form 'pagd'; did you mean 'paged'?"),
    ],
)
def test_a_wrong_option_in_the_configuration_names_the_file(shelf: Shelf, option: str, said: str) -> None:
    path = configure(shelf, f"[options.reference]\n{option}")
    told = f"options.reference in {path}: {said}"
    with pytest.raises(ConfigError, match=rf"^{re.escape(told)}"):
        select_backend(*DECODE)
    with pytest.raises(ConfigError, match=rf"^{re.escape(told)}"):
        load_backend()


def test_a_value_the_factory_cannot_take_is_an_argument_error(shelf: Shelf) -> None:
    source = plugin(factory="dsv4attn_acme:make", options={"tile": 4}) + "\n\ndef make(tile):\n    int('x')\n"
    shelf.install("dsv4attn-acme", source)

    with pytest.raises(
        ArgumentError, match=r"^options of backend acme: expected values it takes, got {'tile': 9} \(Val"
    ):
        load_backend("acme", tile=9)


# what a stranger's factory may do


@pytest.mark.parametrize(
    ("factory", "said"),
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
def test_g9_a_backend_that_cannot_be_made_is_broken(shelf: Shelf, factory: str, said: str) -> None:
    source = plugin(factory="dsv4attn_acme:make") + NO_BACKENDS + f"\n\ndef make():\n    {factory}\n"
    shelf.install("dsv4attn-acme", source)

    with pytest.raises(BrokenBackendError) as caught:
        select_backend(*DECODE, backend="acme")
    assert str(caught.value).startswith(f"backend 'acme' is broken: dsv4attn_acme:make: {said}")


@pytest.mark.parametrize("factory", ["no_such_module_at_all:make", "dsv4attn_acme:no_such_name"])
def test_an_implementation_that_is_not_there_is_broken_with_its_cause(shelf: Shelf, factory: str) -> None:
    shelf.install("dsv4attn-acme", plugin(factory=factory))

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


def test_g6_nothing_of_a_backend_is_imported_before_it_has_won(shelf: Shelf) -> None:
    shelf.install("dsv4attn-acme", plugin(factory="no_such_module_at_all:make"))

    assert isinstance(select_backend(*DECODE, backend="reference"), ReferenceBackend)


def test_a_plugin_that_failed_is_not_loaded_by_name_either(shelf: Shelf) -> None:
    shelf.install("dsv4attn-acme", "raise ImportError('libacme.so')")

    with pytest.raises(
        NoBackendError, match=r"^backend 'acme' cannot be used: failed to load: ImportError: libacme.so"
    ):
        load_backend("acme")


def test_an_unknown_name_is_answered_with_every_plugin_that_is_left_out(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.install("dsv4attn-acme", plugin("acme-2"))
    shelf.install("zinc-kernels", "raise ImportError('libzinc.so')")
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
    """What loading each name says in a process without Triton."""
    code = f"""
import json, sys, traceback
sys.modules["triton"] = None
from dsv4attn import load_backend
said = dict.fromkeys({[*triton_backends()]!r}, "loaded")
for name in said:
    try:
        load_backend(name)
    except Exception:
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("name", triton_backends())
def test_a_backend_without_triton_says_where_it_comes_from(name: str, without_triton: dict[str, str]) -> None:
    said = rf"NoBackendError: backend '{name}' cannot run here: TRITON  no Triton, needs Triton 3.6 or newer -> "
    assert re.search(said + "(pip install triton|reinstall torch)", without_triton[name]), without_triton[name]
    assert "BrokenBackendError" not in without_triton[name]


@pytest.mark.parametrize(
    ("declared", "brought", "says"),
    [
        (
            "()",
            "evolve(LayerOps(), select_topk=select)",
            "BackendInfo.layer_steps names none, and its layer_ops bring selection",
        ),
        (
            "('selection',)",
            "LayerOps()",
            "names selection, and its layer_ops bring none",
        ),
        ("('selection',)", "evolve(LayerOps(), select_topk=select)", ""),
        ("('selection',)", "{'select_topk': select}", "whose layer_ops are dict, not LayerOps"),
    ],
)
def test_a_backend_brings_the_layer_steps_that_its_descriptor_names(
    shelf: Shelf, declared: str, brought: str, says: str
) -> None:
    backend = f"""

from dsv4attn.backends.reference.launch import ReferenceBackend
from attrs import evolve
from dsv4attn.core.contract import LayerOps


def select(*given):
    LayerOps().select_topk(*given)


class Acme(ReferenceBackend):
    name = "acme"

    def __init__(self):
        super().__init__()
        self.layer_ops = {brought}
"""
    source = plugin(factory="dsv4attn_acme:Acme").replace("api=", f"layer_steps={declared}, api=") + backend
    shelf.install("dsv4attn-acme", source)

    if says:
        with pytest.raises(BrokenBackendError, match=re.escape(says)):
            load_backend("acme")
    else:
        assert load_backend("acme").name == "acme"
