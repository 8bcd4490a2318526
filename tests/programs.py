"""Programs that tests start in processes that interpret no kernel, and modules that tests make from changed text."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forked_programs import run_forked

ROOT = Path(__file__).resolve().parents[1]


def run_compiling(*words: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a process that can compile kernels: it interprets none.

    The process has imported torch already, unless the first argument is -W. cache: folder for compiled kernels instead
    of Triton's own.
    """
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    if cache is not None:
        environ["TRITON_CACHE_DIR"] = str(cache)
    if words[0] != "-W":
        return run_forked(words, folder=ROOT, environ=environ)
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=ROOT)


def told_by(*words: str, cache: Path | None = None) -> Any:
    """What such a process prints as JSON; it must end well."""
    done = run_compiling(*words, cache=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def import_text(path: Path, text: str) -> ModuleType:
    """Write a module's text to a file and import it. Its name is the file's, which no other module may have.

    Triton reads the source of a kernel from its file.
    """
    path.write_text(text, encoding="utf-8")
    return import_file(path)


def import_file(path: Path) -> ModuleType:
    """Import a file that is in no package, by its name, which no other module may have."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
