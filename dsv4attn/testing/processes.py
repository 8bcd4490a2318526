"""Runs cases of the kit in other processes, so that a case that ends its process fails and the others run on.

A process runs one case after another. This process notes which case it is before the case begins. If the process ends,
or if the case takes longer than its limit, the case is a failed case with the signal, and a new process runs the rest.

Processes are copies of this one (a fork) on machines without an accelerator, because torch needs seconds to be imported
again. The runtime of an accelerator does not survive a fork: there, each process starts anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import attrs
import torch

from dsv4attn.core.contract.device import may_have_accelerator
from dsv4attn.testing.case import Case
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Outcome, Subject, run_case
from dsv4attn.testing.kit.interpreter_warnings import ignore_interpreter_warnings

TIMEOUT = 900.0
"""Seconds that a case may take, unless the caller says otherwise. A first case may compile kernels for minutes."""
TIME_OUT = "time-out"
"""`Outcome.ended` of a case that took too long."""
UNUSABLE = "unusable device"
"""`Outcome.ended` of a case after which its process cannot use the device any more."""
_MOST_FAILED_STARTS = 2
"""Processes in a row that end before they can run a case, after which no other is started."""
_SECONDS_OF_DUMP = 0.2
_READY, _INTERRUPTED = "ready", "interrupted"
"""What a process sends besides outcomes."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')


@attrs.frozen
class _Recipe:
    """What a process makes its subjects and cases from, if it is no copy of this one.

    trials: name, device and options of each subject.
    names: names of the cases.
    """

    trials: Sequence[tuple[str, str, Mapping[str, Any]]]
    names: Sequence[str]

    def made(self) -> tuple[Sequence[Subject], Sequence[Case]]:
        """The subjects and the cases of the run."""
        ignore_interpreter_warnings()
        subjects = [Subject.named(name, device=device, options=options) for name, device, options in self.trials]
        cases = {case.name: case for case in CASES}
        return subjects, [cases[name] for name in self.names]


@attrs.frozen(eq=False)
class _Copy:
    """What a copy of this process has already. Its pipes are those of other processes, which it must not hold open."""

    subjects: Sequence[Subject]
    cases: Sequence[Case]
    pipes: Sequence[Any]

    def made(self) -> tuple[Sequence[Subject], Sequence[Case]]:
        """The subjects and the cases of the run."""
        for pipe in self.pipes:
            pipe.close()
        return self.subjects, self.cases


def _serve(pipe: Any, source: _Recipe | _Copy, threads: int | None, dump: str, repeat: int) -> None:  # noqa: ANN401 - a connection
    """Run the cases that arrive, and send their outcomes. The first process alone answers Ctrl-C.

    threads: of torch; None: as many as torch takes.
    dump: file that gets the stack if a signal ends this process.
    repeat: number of runs of each case.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # what a backend prints must not stand in the one JSON object of --json; a copy's streams may be locked, too
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - for ever, a number
    with open(dump, "w", encoding="utf-8") as file:  # noqa: PTH123
        faulthandler.enable(file, all_threads=False)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        if threads:
            torch.set_num_threads(threads)
        subjects, cases = source.made()
        pipe.send(_READY)
        while True:
            try:
                case, subject = pipe.recv()
            except EOFError:
                return
            try:
                outcome = run_case(subjects[subject], cases[case], repeat)
            except KeyboardInterrupt:
                pipe.send(_INTERRUPTED)
                return
            if outcome.state == "failed" and not _is_usable(subjects[subject].device):
                outcome = attrs.evolve(outcome, ended=UNUSABLE)
            # without the case itself, whose functions no other process can receive
            pipe.send({field.name: getattr(outcome, field.name) for field in _FIELDS})


_FIELDS = [field for field in attrs.fields(Outcome) if field.name != "case"]


def _is_usable(device: str) -> bool:
    """Whether a device still computes. After an illegal access, a GPU refuses all further work of the process."""
    if device == "cpu":
        return True
    try:
        return torch.zeros(1, dtype=torch.float32, device=device).add(1).item() == 1
    except Exception:  # noqa: BLE001 - torch has an error of its own for each kind of device
        return False


def _kills_for_memory() -> int:
    """Processes that the system has ended because memory ran out. 0 where the system does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@attrs.define(eq=False)
class _Worker:
    """A process and the case that it runs.

    task: number of the case in the run; None if there is no case.
    began: when the case began, or when the process was started for it.
    """

    process: Any
    pipe: Any
    dump: Path
    seconds: float
    kills: int
    task: int | None = None
    began: float = 0.0
    is_ready: bool = False

    def begin(self, task: int, trials: int) -> None:
        """Note the case, then let the process run it. trials: number of subjects."""
        self.task, self.began = task, time.monotonic()
        with contextlib.suppress(OSError):  # the process has ended: its pipe will say so
            self.pipe.send(divmod(task, trials))

    @property
    def left(self) -> float:
        """Seconds that its case may still take."""
        return self.began + self.seconds - time.monotonic()

    def end(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join(10)  # a process in the driver of a device may take longer
        self.pipe.close()

    def failure(self) -> dict[str, Any]:
        """The outcome of a case that ended its process, or that takes too long. The process has ended then."""
        seconds, is_late = time.monotonic() - self.began, self.left <= 0
        if is_late and hasattr(signal, "SIGUSR1") and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(_SECONDS_OF_DUMP)
        elif not is_late:
            self.process.join(10)
        code = self.process.exitcode
        self.end()
        if is_late:
            ended, said = TIME_OUT, f"did not end within {self.seconds:g} s"
        else:
            ended = _name_of_signal(-code) if code is not None and code < 0 else f"exit code {code}"
            said = f"its process ended with {ended}"
        if ended == "SIGKILL":
            is_memory = _kills_for_memory() > self.kills
            said += ": memory ran out" if is_memory else ", which the system sends if memory runs out"
        said += "" if self.is_ready else " before the case began"
        trace = self.dump.read_text(encoding="utf-8", errors="replace") if self.dump.exists() else ""
        return {"message": said + _place_of(trace), "trace": trace, "ended": ended, "seconds": seconds}


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _place_of(trace: str) -> str:
    """The innermost frame of a stack that `faulthandler` wrote, as in the message of an exception."""
    frame = _FRAME.search(trace)
    return f" (in {frame[3]}, {Path(frame[1]).name}:{frame[2]})" if frame else ""


def outcomes_in_processes(
    trials: Sequence[Subject], cases: Sequence[Case], jobs: int = 1, *, seconds: float = TIMEOUT, repeat: int = 1
) -> Generator[Outcome, None, None]:
    """Outcomes of each case on every backend, in the order of the cases. One process runs many cases.

    A case that ends its process, or takes longer than its limit, has failed, and `Outcome.ended` says how it ended.
    If the iterator is closed early, all processes end. On a machine that may have an accelerator, and on systems
    other than Linux, each process makes the backends by their names and options, and finds cases by their names.

    trials: the backends; with registered names, unless processes are copies of this one.
    cases: the cases; of `CASES`, unless processes are copies of this one.
    jobs: number of processes.
    seconds: seconds that a case may take, with all its runs.
    repeat: number of runs of each case, as of `run_case`.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4attn-conform-", ignore_cleanup_errors=True) as folder:
        run = _Run(trials, cases, jobs, seconds, repeat, Path(folder))
        try:
            for task in range(len(cases) * len(trials)):
                while task not in run.done:
                    run.advance(task)
                yield run.done.pop(task)
        finally:
            for worker in run.workers:
                worker.end()


@attrs.define(eq=False)
class _Run:
    """The processes of a run. Task i is case i // (number of subjects) on subject i % (number of subjects).

    folder: for the stacks of processes that end.
    workers: the processes.
    done: outcomes by task, until they are taken.
    begun: number of tasks that have begun.
    failed_starts: processes in a row that ended before their first case.
    last_failure: fields of the outcome of the last of them.
    """

    trials: Sequence[Subject]
    cases: Sequence[Case]
    jobs: int
    seconds: float
    repeat: int
    folder: Path
    workers: list[_Worker] = attrs.field(factory=list)
    done: dict[int, Outcome] = attrs.field(factory=dict)
    begun: int = 0
    starts: int = 0
    failed_starts: int = 0
    last_failure: dict[str, Any] = attrs.field(factory=dict)

    def advance(self, task: int) -> None:
        """Let all processes work, and take what they send until an outcome may be there. task: the one waited for."""
        if self.failed_starts >= _MOST_FAILED_STARTS:
            self._note(task, {**self.last_failure, "seconds": 0.0})
            return
        self._begin_tasks()
        for worker in _answering(self.workers):
            answer = _answer_of(worker)
            if answer == _INTERRUPTED:
                raise KeyboardInterrupt
            if answer == _READY:
                # the time that the process took to start is not the case's
                worker.is_ready, worker.began, self.failed_starts = True, time.monotonic(), 0
                continue
            assert worker.task is not None
            self._note(worker.task, answer)
            worker.task = None
            if answer["ended"]:
                self.workers.remove(worker)
                worker.end()
                if not worker.is_ready:
                    self.failed_starts, self.last_failure = self.failed_starts + 1, answer

    def _begin_tasks(self) -> None:
        while self.begun < len(self.cases) * len(self.trials):
            idle = next((worker for worker in self.workers if worker.task is None), None)
            if idle is None:
                if len(self.workers) >= self.jobs:
                    return
                idle = self._started()
                self.workers.append(idle)
            idle.begin(self.begun, len(self.trials))
            self.begun += 1

    def _started(self) -> _Worker:
        """A new process."""
        is_copy = sys.platform == "linux" and not may_have_accelerator()
        context: Any = multiprocessing.get_context("fork" if is_copy else "spawn")
        mine, its = context.Pipe()
        source: _Copy | _Recipe = _Copy(self.trials, self.cases, [*(worker.pipe for worker in self.workers), mine])
        if not is_copy:
            named = [(trial.name, trial.device, dict(trial.options)) for trial in self.trials]
            source = _Recipe(named, [case.name for case in self.cases])
        threads = max(1, (os.cpu_count() or 1) // self.jobs) if self.jobs > 1 else None
        dump = self.folder / str(self.starts)
        process = context.Process(target=_serve, args=(its, source, threads, str(dump), self.repeat))
        # in a copy, OpenMP waits for ever for the threads that it had started in the thread that was copied: a new
        # thread has none
        thread = threading.Thread(target=_start, args=(process,))
        thread.start()
        thread.join()
        its.close()
        self.starts += 1
        return _Worker(process, mine, dump, self.seconds, _kills_for_memory())

    def _note(self, task: int, answer: dict[str, Any]) -> None:
        self.done[task] = Outcome(self.cases[task // len(self.trials)], **answer)


def _start(process: Any) -> None:  # noqa: ANN401 - of a context
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks where there are threads
        process.start()


def _answering(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait until a process has sent something, has ended, or is late."""
    busy = [worker for worker in workers if worker.task is not None]
    ready = connection.wait([worker.pipe for worker in busy], max(0.0, min(worker.left for worker in busy)))
    return [worker for worker in busy if worker.pipe in ready or worker.left <= 0]


def _answer_of(worker: _Worker) -> Any:  # noqa: ANN401 - what the process sent
    """What a process has sent, or the failure of its case."""
    try:
        if worker.pipe.poll():
            return worker.pipe.recv()
    except (EOFError, OSError):
        pass
    return {"state": "failed", **worker.failure()}
