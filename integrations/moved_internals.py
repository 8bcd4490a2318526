"""Which of the engines' names that the adapters rely on are not where they were: `python moved_internals.py [FOLDER]`.

For a run every night: FOLDER has the Python files of the engines' newest wheels, see `engine_python.py --target`.
Without it the installed engines are looked at. One line for each name that is not there or takes other arguments, then
a line for each engine. The exit status is 1 if there is such a name, and 2 if FOLDER has neither engine.

The tables are those that the adapters check before they replace anything, with the parts of all platforms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
ENGINES = {"vllm": "dsv4attn_vllm", "sglang": "dsv4attn_sglang"}
"""The packages of the engines, and of the adapters."""
CPU = {"VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "VLLM_NO_USAGE_STATS": "1"}


def moved(engine: str, folder: Path | None = None) -> dict[str, Any]:
    """What an adapter misses in an engine, asked in a process of its own: the version, names in the table, lines.

    folder: has the engine's Python files; None: the installed one.
    """
    adapter = ROOT / "integrations" / f"dsv4attn-{engine}"
    paths = [*([folder] if folder else []), adapter, adapter / "tests", ROOT]
    environment = {**os.environ, **CPU, "PYTHONPATH": os.pathsep.join(str(path) for path in paths)}
    command = [sys.executable, __file__, "--process", engine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine} cannot be looked at:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _look(engine: str) -> dict[str, Any]:
    """The same in this process."""
    import torch

    if engine == "sglang":
        # FlashMLA's libraries need CUDA
        import_module("fakes").install()
    # modules for ROCm ask for a GPU when they are imported; those of other platforms are looked at before it is faked
    properties = SimpleNamespace(
        gcnArchName="gfx950:sramecc+", multi_processor_count=256, warp_size=64, name="", total_memory=2**38
    )
    internals = import_module(f"{ENGINES[engine]}.internals")
    engine_internals = import_module("dsv4attn.integrations.engine_internals")
    installed = version(engine)
    parts = internals.parts_of(installed)
    lines: dict[str, None] = {}
    for rocm in (False, True):
        if rocm:
            torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
        entries = [entry for part in parts if ("rocm" in part) is rocm for entry in internals.TABLE[part]]
        lines.update(dict.fromkeys(engine_internals.lacking(entries, engine)))
    names = sum(len(entry.names()) for part in parts for entry in internals.TABLE[part])
    return {"version": installed, "names": names, "moved": list(lines)}


def described(engine: str, looked: Mapping[str, Any]) -> str:
    """The lines of a report, and the verdict after them."""
    lines, names = looked["moved"], looked["names"]
    verdict = f"{engine} {looked['version']}: of {names} names that {ENGINES[engine]} relies on, {len(lines)} moved"
    return "\n".join([*lines, verdict])


def main(arguments: list[str]) -> int:
    """See the module."""
    if arguments[:1] == ["--process"]:
        print(json.dumps(_look(arguments[1])))
        return 0
    folder = Path(arguments[0]).absolute() if arguments else None
    engines = [engine for engine in ENGINES if folder is None or (folder / engine).is_dir()]
    if not engines:
        fill = f"python engine_python.py --target {folder} vllm sglang"
        print(f"{folder} has neither {' nor '.join(ENGINES)}: fill it by `{fill}`")
        return 2
    reports = {engine: moved(engine, folder) for engine in engines}
    for engine, looked in reports.items():
        print(described(engine, looked))
    return int(any(looked["moved"] for looked in reports.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
