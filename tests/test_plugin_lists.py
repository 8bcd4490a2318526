"""The registry as a whole: lists of names, discovery, order, and workers (promises G8 and G9)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.plugins import BUILT_IN, PluginRegistry
from tests.vendor_wheel import VendorWheels, only_failure, plugin

# lists


@pytest.mark.parametrize("name", ["acme", "dsv4attn-acme", "dsv4attn_acme", "DSV4Attn.Acme", "dsv4attn-*", "*"])
def test_a_denied_plugin_is_not_even_imported(wheels: VendorWheels, name: str) -> None:
    wheels.install("dsv4attn-acme", "raise SystemError('was imported')")
    failure = only_failure(wheels.registry(deny=[name], deny_source="plugins.deny in x.toml"))

    cure = "take it off that list to use it"
    assert failure.stage == "denied"
    assert not failure.is_problem
    assert str(failure) == f"acme not loaded: denied by plugins.deny in x.toml (dsv4attn-acme 0.2) -> {cure}"


def test_with_a_list_of_allowed_plugins_no_others_are_loaded(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    wheels.install("bolt-kernels", plugin("bolt"))
    registry = wheels.registry(allow=["acme"])

    assert sorted(registry.backends) == sorted(["acme", *BUILT_IN])
    assert (only_failure(registry).plugin, only_failure(registry).stage) == ("kernels", "denied")


def test_denying_wins_over_allowing_and_an_empty_list_allows_none(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())

    assert "acme" not in wheels.registry(allow=["acme"], deny=["acme"]).backends
    assert sorted(wheels.registry(allow=[]).backends) == sorted(BUILT_IN)


@pytest.mark.parametrize("key", ["allow", "deny"])
def test_g9_a_name_in_a_list_that_no_plugin_has_is_a_failure(wheels: VendorWheels, key: str) -> None:
    wheels.install("dsv4attn-acme", plugin())
    lists = {"allow": ["acme", "acmee"]} if key == "allow" else {"deny": ["acmee"]}
    failure = only_failure(wheels.registry(**lists))

    assert failure.stage == "absent"
    assert f"named by plugins.{key}; did you mean 'acme'?" in str(failure)


def test_built_in_backends_are_subject_to_no_list(wheels: VendorWheels) -> None:
    assert wheels.registry(allow=["reference"], deny=["*"]).failures == ()
    registry = wheels.registry(deny=["reference"])

    assert "reference" in registry.backends
    assert str(only_failure(registry)).startswith("reference is loaded nevertheless: built in, named by plugins.deny")


# discovery


def test_broken_metadata_of_another_package_does_not_hide_plugins(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    wheels.install("careless", "", entry_points="[console_scripts]\nthis line has no equals sign\n")

    assert "acme" in PluginRegistry.load().backends


def test_an_entry_point_without_a_distribution_is_loaded() -> None:
    point = importlib.metadata.EntryPoint("acme", "no_such_module_at_all", "dsv4attn")
    failure = only_failure(PluginRegistry.load(entry_points=[point]))

    assert (failure.distribution, failure.stage) == ("unknown", "load")


# workers

WORKERS = """
import json, multiprocessing, os, sys

def content(_=None):
    from dsv4attn.plugins import PluginRegistry
    registry = PluginRegistry.load()
    backends = [(name, entry.owner, entry.info.native) for name, entry in registry.backends.items()]
    return [os.getpid(), backends, [str(failure) for failure in registry.failures]]

if __name__ == "__main__":
    contents = {"parent": content()}
    for method in ("spawn", "fork"):
        if method in multiprocessing.get_all_start_methods():
            with multiprocessing.get_context(method).Pool(2) as pool:
                contents[method] = pool.map(content, range(2))[0]
    print(json.dumps(contents))
"""


def test_g8_every_worker_sees_the_same_registry(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    wheels.install("bolt-kernels", plugin("bolt"))
    wheels.install("broken-wheel", "raise ImportError('no')")
    script = wheels.folder / "workers.py"
    script.write_text(WORKERS, encoding="utf-8")
    path = os.pathsep.join([str(wheels.folder), str(Path(__file__).resolve().parents[1])])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    contents: dict[str, list[Any]] = json.loads(done.stdout)

    assert "spawn" in contents
    assert len({pid for pid, *_ in contents.values()}) == len(contents)
    for content in contents.values():
        assert content[1:] == contents["parent"][1:]
    assert [name for name, *_ in contents["parent"][1]] == ["acme", "bolt", *BUILT_IN]
    assert len(contents["parent"][2]) == 1


def test_loading_twice_gives_the_same(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    wheels.install("broken-wheel", "raise ImportError('no')")

    first, second = wheels.registry(), wheels.registry()
    assert [str(failure) for failure in first.failures] == [str(failure) for failure in second.failures]
    assert [*first.backends] == [*second.backends]


def test_the_order_on_the_path_means_nothing(wheels: VendorWheels) -> None:
    for name in ("acme", "bolt", "zinc"):
        wheels.install(f"dsv4attn-{name}", plugin(name))
    wheels.install("broken-wheel", "raise ImportError('no')")
    points = wheels.points()
    registries = [PluginRegistry.load(entry_points=order) for order in (points, points[::-1])]

    assert [*registries[0].backends] == [*registries[1].backends]
    assert [failure.plugin for failure in registries[0].failures] == [
        failure.plugin for failure in registries[1].failures
    ]


def test_a_plugin_may_load_the_registry_while_it_is_loaded(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", "from dsv4attn.plugins import PluginRegistry\nPluginRegistry.load()\n" + plugin())

    assert "acme" in PluginRegistry.load().backends


def test_failures_travel_between_processes(wheels: VendorWheels) -> None:
    wheels.install("broken-wheel", "raise ImportError('no')")
    failures = wheels.registry().failures

    assert pickle.loads(pickle.dumps(failures)) == failures  # noqa: S301 - our own
