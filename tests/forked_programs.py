"""Programs that start with torch imported: copies of one process, each with a folder, variables and a path of its own.

An import of torch takes longer than most programs of the tests. A copy has imported torch and what torch imports, and
nothing of this project. All else is as in a new interpreter: `sys.path`, `__main__`, variables, what an error prints.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_forked(
    command: Sequence[str], *, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ...`, `python -m MODULE ...` or `python FILE ...` in a copy of a process with torch imported.

    folder: None for this process's. environ: all variables, None for this process's; of those that Python reads when it
    starts, PYTHONPATH and PYTHONDONTWRITEBYTECODE count.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as outputs:
        request: dict[str, Any] = {"command": [*command], "folder": str(folder or Path.cwd()), "outputs": outputs}
        request["environ"] = {**(os.environ if environ is None else environ)}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (Path(outputs, name).read_text(encoding="utf-8") for name in ("out", "err"))
    return subprocess.CompletedProcess([sys.executable, *command], code, out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that is copied. It ends with this one."""
    # what Python and torch read when they start; all other variables are those of a copy
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def _serve() -> dict[str, Any] | None:
    """Answer requests with exit codes. Returns the request in each copy, and None at the end in the original."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            request: dict[str, Any] = json.loads(line)
            return request
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _end(request: dict[str, Any]) -> None:
    """Be the program of a request to its end, and leave all of torch in memory: to give it back takes half a second."""
    code: Any = None
    try:
        _become(request)
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    except SystemExit as asked:
        code = asked.code
    except BaseException:  # noqa: BLE001 - printed, as by any program
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _become(request: dict[str, Any]) -> None:
    """Take over folder, variables, path and outputs of a request, and run it."""
    for number, name in enumerate(("in", "out", "err")):
        path = os.devnull if number == 0 else str(Path(request["outputs"], name))
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    how, *words = request["command"]
    first = {"-c": "", "-m": str(Path.cwd())}.get(how, str(Path(how).parent))
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if how == "-c":
        sys.argv = [how, *words[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(main))  # noqa: S102 - what `python -c` does
    elif how == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [how, *words]
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    import torch  # noqa: F401 - for all copies

    gc.freeze()  # so that a copy looks at its own objects alone
    request = _serve()
    if request is not None:
        _end(request)
