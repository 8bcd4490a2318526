"""Backends of other vendors' wheels, most of which are broken (promise G8)."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4attn.core.contract.backend import BackendInfo
from dsv4attn.errors import ArgumentError
from dsv4attn.plugins import BUILT_IN, PluginRegistry, first_line
from tests.vendor_wheel import VendorWheels, only_failure, plugin

HOOK = "from dsv4attn.hookspecs import hookimpl\n"


def test_the_built_in_backends_are_plugins() -> None:
    registry = PluginRegistry.load(entry_points=[])

    assert sorted(registry.backends) == sorted(BUILT_IN)
    assert {backend.distribution for backend in registry.backends.values()} == {"dsv4attn"}
    assert registry.failures == ()


def test_g8_a_wheel_with_one_entry_point_adds_a_backend(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    registry = wheels.registry()

    assert registry.failures == ()
    assert registry.backends["acme"].owner == "dsv4attn-acme 0.2"
    assert registry.backends["acme"].info.native == ("sm_90",)
    assert "reference" in registry.backends


def test_g8_installed_wheels_are_found_by_themselves(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())

    assert "acme" in PluginRegistry.load().backends


def test_g8_two_vendors_live_in_one_process(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    wheels.install("bolt-kernels", plugin("bolt"))

    assert {"acme", "bolt", "reference"} <= {*wheels.registry().backends}


def test_one_wheel_may_bring_several_backends(wheels: VendorWheels) -> None:
    source = plugin("acme").replace("    return [Backend", "    return [*twin(), Backend")
    source += "\n\ndef twin():\n    from attrs import evolve\n"
    source += "    return [BackendInfo(name='acme-two', api='1.0', factory='a:b', support=support, summary='',"
    source += " native=())]\n"
    wheels.install("dsv4attn-acme", source)

    assert {"acme", "acme-two"} <= {*wheels.registry().backends}


# broken wheels: (source, entry point's target after the module, stage, text)
BROKEN = {
    "import": ("raise ImportError('libacme.so: cannot open')", "", "load", "ImportError: libacme.so: cannot open"),
    "any error": ("1 / 0", "", "load", "ZeroDivisionError: division by zero"),
    "exit": ("import sys; sys.exit(3)", "", "load", "SystemExit: 3"),
    "panic": ("class Panic(BaseException): pass\nraise Panic('rust')", "", "load", "Panic: rust"),
    "missing": ("", ":nothing", "load", "AttributeError"),
    "syntax": ("def f(:", "", "load", "SyntaxError"),
    "message": (
        "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
        "",
        "load",
        "Odd: <a message that cannot be printed>",
    ),
    "lines": ("raise ValueError('one\\ntwo')", "", "load", "ValueError: one"),
    "class": ("class Plugin:\n    pass", ":Plugin", "hooks", "expected a module, got the class Plugin"),
    "object": (
        "class Plugin:\n    def __getattribute__(self, name): raise SystemError('hung')\nit = Plugin()",
        ":it",
        "hooks",
        "expected a module, got an object of type Plugin",
    ),
    "misspelt": (
        HOOK + "@hookimpl\ndef dsv4attn_backend(): return []",
        "",
        "hooks",
        "unknown hook 'dsv4attn_backend'; did you mean 'dsv4attn_backends'?",
    ),
    "argument": (HOOK + "@hookimpl\ndef dsv4attn_backends(device): return []", "", "hooks", "{'device'} are declared"),
    "unmarked": ("def dsv4attn_backends(): return []", "", "hooks", "it implements no hook"),
    "raises": (HOOK + "@hookimpl\ndef dsv4attn_backends(): 1 / 0", "", "call", "ZeroDivisionError"),
    "exits": (HOOK + "import sys\n@hookimpl\ndef dsv4attn_backends(): sys.exit()", "", "call", "SystemExit"),
    "none": (
        HOOK + "@hookimpl\ndef dsv4attn_backends(): pass",
        "",
        "descriptor",
        "expected a list of BackendInfo, got",
    ),
    "dict": (HOOK + "@hookimpl\ndef dsv4attn_backends(): return {}", "", "descriptor", "got dict"),
    "generator": (HOOK + "@hookimpl\ndef dsv4attn_backends(): yield 1", "", "descriptor", "got generator"),
    "strings": (HOOK + "@hookimpl\ndef dsv4attn_backends(): return ['x']", "", "descriptor", "a BackendInfo, got str"),
    "field": (plugin(native="cpu"), "", "call", "BackendInfo.native: expected a tuple of strings, got 'cpu'"),
    "version": (plugin(api="2.3"), "", "version", "is written for contract 2.3, this is 1."),
    "minor": (plugin(api="1.7"), "", "version", "is written for contract 1.7, this is 1.0"),
    "no version": (plugin(api="newest"), "", "version", "is written for contract newest, this is 1.0"),
    "name": (plugin("Acme 1"), "", "name", "cannot be called 'Acme 1'"),
    "auto": (plugin("auto"), "", "name", "cannot be called 'auto'"),
}


@pytest.mark.parametrize(("source", "target", "stage", "text"), BROKEN.values(), ids=BROKEN)
def test_g8_a_broken_wheel_changes_nothing_but_one_diagnostic(
    wheels: VendorWheels, source: str, target: str, stage: str, text: str
) -> None:
    wheels.install("dsv4attn-acme", plugin())
    without = wheels.registry()
    wheels.install("broken-wheel", source, point="broken", target=f"broken_wheel{target}")
    registry = wheels.registry()
    failure = only_failure(registry)

    assert registry.backends == without.backends
    assert (failure.distribution, failure.version, failure.plugin) == ("broken-wheel", "0.2", "broken")
    assert failure.stage == stage
    assert text in failure.error
    assert "\n" not in str(failure)
    assert "broken-wheel 0.2" in str(failure)
    assert "broken" in str(failure)


@pytest.mark.parametrize("case", ["import", "raises", "misspelt", "argument", "lines"])
def test_a_failure_keeps_its_traceback(wheels: VendorWheels, case: str) -> None:
    wheels.install("broken-wheel", BROKEN[case][0])
    failure = only_failure(wheels.registry())

    assert failure.traceback.rstrip().splitlines()[-1] != ""
    assert "Error: " in failure.traceback
    assert ("broken_wheel.py" in failure.traceback) == (case not in ("misspelt", "argument"))
    assert "importlib" not in failure.traceback


@pytest.mark.parametrize("api", ["1.0", "1"])
def test_a_version_that_this_one_includes_is_loaded(wheels: VendorWheels, api: str) -> None:
    wheels.install("dsv4attn-acme", plugin(api=api))

    assert "acme" in wheels.registry().backends


def test_one_bad_descriptor_does_not_take_the_others_with_it(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin().replace("    return [Backend", "    return [7, Backend"))
    registry = wheels.registry()

    assert "acme" in registry.backends
    assert only_failure(registry).stage == "descriptor"


def test_g9_two_wheels_with_one_name_both_lose_it_and_are_both_named(wheels: VendorWheels) -> None:
    wheels.install("acme-one", plugin("acme"))
    wheels.install("acme-two", plugin("acme"))
    registry = wheels.registry()

    assert "acme" not in registry.backends
    assert [failure.distribution for failure in registry.failures] == ["acme-one", "acme-two"]
    for failure in registry.failures:
        assert failure.plugin == "acme"
        assert "plugin one of acme-one and by plugin two of acme-two" in failure.error


def test_two_wheels_with_one_entry_point_name_are_both_loaded(wheels: VendorWheels) -> None:
    wheels.install("acme-one", plugin("one"), point="acme")
    wheels.install("acme-two", plugin("two"), point="acme")

    assert {"one", "two"} <= {*wheels.registry().backends}


def test_a_plugin_cannot_take_the_name_of_a_built_in_backend(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin("reference"))
    registry = wheels.registry()

    assert registry.backends["reference"].distribution == "dsv4attn"
    assert "'reference' is the name of a built-in backend" in only_failure(registry).error


def test_a_wheel_cannot_give_one_name_to_two_backends(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin().replace("    return [", "    return 2 * ["))

    assert {failure.error for failure in wheels.registry().failures} == {"'acme' is given to two backends"}


def test_a_module_with_lazy_names_is_not_asked_for_them(wheels: VendorWheels) -> None:
    lazy = "\n\ndef __getattr__(name):\n    raise SystemError(name)\n\n\ndef __dir__():\n    return ['torch_backend']\n"
    wheels.install("dsv4attn-acme", plugin() + lazy)
    registry = wheels.registry()

    assert registry.failures == ()
    assert "acme" in registry.backends


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", HOOK + "@hookimpl\ndef dsv4attn_backends(): stop()"])
def test_ctrl_c_is_not_caught(wheels: VendorWheels, source: str) -> None:
    wheels.install("dsv4attn-acme", source + "\n\ndef stop(): raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        wheels.registry()


# what pluggy does by itself, and that it has no effect here


def test_pluggy_an_argument_the_spec_does_not_have_is_refused(wheels: VendorWheels) -> None:
    wheels.install("broken-wheel", BROKEN["argument"][0])
    wheels.install("dsv4attn-acme", plugin())
    registry = wheels.registry()

    assert "acme" in registry.backends
    assert only_failure(registry).cure.startswith("install a release of it for contract 1.")


@pytest.mark.parametrize("case", ["import", "raises"])
def test_pluggy_a_raising_import_or_hook_does_not_end_the_loading(wheels: VendorWheels, case: str) -> None:
    for name in ("a-broken", "z-broken"):
        wheels.install(name, BROKEN[case][0])
    wheels.install("dsv4attn-acme", plugin())
    registry = wheels.registry()

    assert "acme" in registry.backends
    assert [failure.distribution for failure in registry.failures] == ["a-broken", "z-broken"]


# descriptors


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("name", 3, "a string"),
        ("api", 1.0, "a string"),
        ("native", ["cpu"], "a tuple of strings"),
        ("packages", (1,), "a tuple of strings"),
        ("factory", "module.without.colon", "'package.module:callable'"),
        ("support", None, "a function"),
        ("rank", 2, "a Rank"),
        ("options", ["tile"], "a dict"),
    ],
)
def test_a_descriptor_names_the_field_that_is_wrong(name: str, value: object, expected: str) -> None:
    fields: dict[str, Any] = {"name": "a", "api": "1.0", "factory": "a:b", "summary": "", "native": ()}

    with pytest.raises(ArgumentError, match=rf"^BackendInfo.{name}: expected {expected}, got"):
        BackendInfo(**{**fields, "support": print, name: value})


def test_the_first_line_of_an_error_is_one_line() -> None:
    assert first_line(ValueError("  one\ntwo")) == "ValueError: one"
    assert first_line(ValueError()) == "ValueError: (no message)"
