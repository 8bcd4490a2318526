"""Compiling forms of kernels in several processes, which leave them in Triton's disk cache.

Python's lock lets the threads of one process compile nearly one after the other. Worker processes have a lock each. A
worker touches no device: it cross-compiles, under the same key of Triton's cache as a launch. The process that starts
the workers then compiles as ever, and finds the forms in the cache.

Workers are plain subprocesses: a process that has initialised CUDA cannot fork one, and a daemonic process of
`multiprocessing`, which workers of engines are, may not start another. A worker reads pickled forms from its standard
input, one by one, and answers each with a line of JSON: null, or the error. It ends when its input ends, thus also
when the process that started it dies.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import IO

import triton
from attrs import frozen
from filelock import FileLock, Timeout
from triton.backends.compiler import GPUTarget

from dsv4attn.backends._triton.compiling.aot import compile_for_gpu, is_cached, threads
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED

Form = tuple[Variant, bool]
"""A variant, and whether the form is the one for tensors beyond 2 GB (see `FAR_FORMS`)."""

LOCK_NAME = "dsv4attn-compiles.lock"
"""File in Triton's cache directory, which the process that compiles for all processes of a host has locked."""

FEWEST_FORMS = 16
"""Fewer missing forms than this are not worth the start of a worker, which imports torch."""
_FORMS_PER_WORKER = 4
_LONGEST_WAIT = 300.0
"""Seconds that a process waits for the lock. After that it compiles without the lock."""
_LONGEST_SILENCE = 300.0
"""Seconds without any answer from any worker after which the workers count as stuck."""
_LOCK_INTERVAL = 0.1

_HIDE_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dsv4attn.backends._triton.compiling.processes import work; work()"
)
"""What a worker runs. With `python -m` the current directory would come before the paths of the starting process."""

_log = logging.getLogger("dsv4attn")


def compile_in_processes(forms: Sequence[Form], target: GPUTarget) -> tuple[int, int]:
    """Compile the forms that Triton's disk cache lacks in worker processes.

    Of several processes of one host that share the cache directory, one compiles and the others wait.

    forms: of one warm-up, each once.
    target: the device that the forms will run on, as this process's driver describes it.
    Returns the number of forms that workers compiled, and the number of workers. Both are 0 where too few forms are
    missing, or this process may use only one core. Forms that workers did not compile, for whatever reason, are left
    to the caller; a reason other than a form that does not compile is in the log.
    """
    if not _is_possible(target) or _workers_for(_missing(forms, target)) == 0:
        return 0, 0
    with _sole_compiler(Path(triton.knobs.cache.dir)):
        # another process may have compiled them meanwhile
        missing = _missing(forms, target)
        workers = _workers_for(missing)
        if workers == 0:
            return 0, 0
        return _compile_all(missing, target, workers), workers


def _is_possible(target: GPUTarget) -> bool:
    """Whether a worker compiles the same as this process would, without a device."""
    # a compiler for Intel asks the device
    is_cross_compiled = target.backend in {"cuda", "hip"}
    hook = getattr(triton.knobs.runtime, "add_stages_inspection_hook", None)
    return is_cross_compiled and not INTERPRETED and hook is None and not triton.knobs.compilation.always_compile


def _workers_for(missing: Sequence[Form]) -> int:
    """How many workers to start for these forms; 0 if this process had better compile them."""
    workers = min(threads(), len(missing) // _FORMS_PER_WORKER)
    return workers if workers > 1 and len(missing) >= FEWEST_FORMS else 0


def _missing(forms: Sequence[Form], target: GPUTarget) -> list[Form]:
    """Forms that the cache lacks, those that probably take longest first."""
    missing = []
    for variant, far in forms:
        # compiling in this process raises what is wrong with a form
        with suppress(Exception):
            if not is_cached(variant, target, far=far):
                missing.append((variant, far))
    # kernels in Gluon are the largest
    return sorted(missing, key=lambda form: form[0].kernel.is_gluon(), reverse=True)


@frozen
class _Answer:
    """What happened to a worker.

    compiled: whether the worker compiled a form.
    ended: whether no more answers of this worker follow.
    failure: why the worker ended early.
    """

    compiled: bool = False
    ended: bool = False
    failure: str = ""


def _compile_all(forms: Sequence[Form], target: GPUTarget, count: int) -> int:
    """Have workers compile forms. Returns the number of forms that were compiled."""
    pickled, reason = _pickled(forms)
    pending, answers = deque(pickled), queue.SimpleQueue[_Answer]()
    workers: list[_Worker] = []
    feeders: list[Thread] = []
    compiled = 0
    try:
        for _ in range(count):
            workers.append(_Worker(target))
            feeders.append(Thread(target=_feed, args=(workers[-1], pending, answers), daemon=True))
            feeders[-1].start()
        compiled, failure = _collected(answers, count)
        reason = reason or failure
    except Exception as error:  # noqa: BLE001 - such as a Python whose path is not known
        reason = f"a worker cannot be started: {error}"
    finally:
        # after an interrupt, too
        for worker in workers:
            worker.kill()
        for feeder in feeders:
            feeder.join()
        for worker in workers:
            worker.close()
    if reason:
        _log.warning("dsv4attn: kernels are compiled in this process where workers did not: %s", reason)
    return compiled


def _pickled(forms: Sequence[Form]) -> tuple[list[bytes], str]:
    """The forms that can be sent to another process, and the reason if others cannot."""
    pickled, reason = [], ""
    for form in forms:
        try:
            pickled.append(pickle.dumps(form))
        except Exception as error:  # noqa: BLE001 - whatever pickling raises
            reason = str(error)
    return pickled, reason


def _collected(answers: queue.SimpleQueue[_Answer], working: int) -> tuple[int, str]:
    """Wait until this number of workers has ended. Returns the number of forms compiled, and why a worker failed."""
    compiled, reason = 0, ""
    while working:
        try:
            answer = answers.get(timeout=_LONGEST_SILENCE)
        except queue.Empty:
            return compiled, f"no worker answered for {_LONGEST_SILENCE:.0f} s"
        compiled += answer.compiled
        working -= answer.ended
        reason = reason or answer.failure
    return compiled, reason


def _feed(worker: _Worker, pending: deque[bytes], answers: queue.SimpleQueue[_Answer]) -> None:
    """Give a worker one form after the other until none is left, or the worker fails."""
    failure = ""
    try:
        for form in _taken(pending):
            answers.put(_Answer(compiled=worker.compile(form)))
    except Exception as error:  # noqa: BLE001 - the other workers go on
        failure = worker.failure(error)
    finally:
        answers.put(_Answer(ended=True, failure=failure))


def _taken(pending: deque[bytes]) -> Iterator[bytes]:
    """Take forms that no other thread has taken."""
    while True:
        try:
            yield pending.popleft()
        except IndexError:
            return


class _Worker:
    """A process that compiles forms for a target."""

    def __init__(self, target: GPUTarget) -> None:
        environ = {**os.environ, **_HIDE_DEVICES, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": triton.knobs.cache.dir}
        # kernels are not interpreted in this process, whatever the variable says now
        environ.pop("TRITON_INTERPRET", None)
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with this module
                [sys.executable, "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                env=environ,
            )
        except BaseException:
            self._messages.close()
            raise
        self._unsent = pickle.dumps(target)

    def compile(self, form: bytes) -> bool:
        """Whether the worker could compile a form. Raises OSError or ValueError if the worker has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self._unsent + form)
        self._process.stdin.flush()
        self._unsent = b""
        return json.loads(self._process.stdout.readline()) is None

    def failure(self, error: Exception) -> str:
        """Why the worker has ended, in one line."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        return f"a worker ended with code {self._process.poll()}: {lines[-1] if lines else error}"

    def kill(self) -> None:
        """End the process. What it has answered is in the cache."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes. No thread may use them any more."""
        for stream in (self._process.stdin, self._process.stdout, self._messages):
            if stream is not None:
                # a form that the worker never read may still be in the pipe's buffer
                with suppress(OSError):
                    stream.close()


@contextmanager
def _sole_compiler(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache directory inside a `with` block.

    The block runs without the lock where there are no locks of files, where the directory cannot be written, or where
    the lock was not free for `_LONGEST_WAIT` seconds. The system frees the lock of a process that ends.
    """
    lock = FileLock(folder / LOCK_NAME, mode=0o666)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            _log.info("dsv4attn: another process compiles kernels into %s; this process waits", folder)
            lock.acquire(_LONGEST_WAIT, _LOCK_INTERVAL)
    except Timeout:
        _log.warning("dsv4attn: another process compiles kernels for over %.0f s", _LONGEST_WAIT)
    except (NotImplementedError, OSError):
        # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


def work() -> None:
    """Compile what standard input names, until it ends. The whole life of a worker."""
    requests = sys.stdin.buffer
    # prints of a compiler must not be taken for answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with suppress(EOFError):
        target = pickle.load(requests)  # noqa: S301 - from the process that started this one
        while True:
            answers.write(json.dumps(_error_of(requests, target)) + "\n")
            answers.flush()


def _error_of(requests: IO[bytes], target: GPUTarget) -> str | None:
    """Read one form and compile it; what the compiler raised."""
    variant, far = pickle.load(requests)  # noqa: S301 - from the process that started this one
    try:
        compile_for_gpu(variant, target, far=far)
    except Exception as error:  # noqa: BLE001 - the process that started this one compiles again, and raises
        return str(error)
    return None
