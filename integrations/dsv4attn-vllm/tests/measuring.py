"""What both commands share that measure an engine with dsv4attn and without: on_gpu/measure_serving.py of two wheels.

This module imports neither an engine nor torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from released_sizes import KINDS, RELEASED

FIGURES = {
    "first_token_s": ("first token, s", 3),
    "per_token_ms": ("per token, ms", 2),
    "decode_ms": ("in decode, ms", 2),
    "step_ms": ("step, ms", 2),
    "busy_ms": ("device busy, ms", 2),
    "tokens_per_s": ("tokens/s", 0),
}
"""Figures of a case: the head of the column, and how many decimals are shown."""
LOG_CHARACTERS = 3000
"""At the end of the log of an engine that failed, which are printed and saved."""
CONFIGURATION = {
    **RELEASED,
    "head_dim": 512,
    "num_experts_per_tok": 6,
    "vocab_size": 129280,
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": "bfloat16",
}


def write_configuration(folder: Path | str, kinds: Sequence[str], sizes: Mapping[str, Any]) -> None:
    """Write the configuration of a model of these layers as transformers does. sizes: besides CONFIGURATION."""
    from transformers import DeepseekV4Config

    layers = {"layer_types": [KINDS[kind] for kind in kinds], "mlp_layer_types": ["moe"] * len(kinds)}
    DeepseekV4Config(**CONFIGURATION | sizes | layers, num_hidden_layers=len(kinds)).save_pretrained(folder)


class EngineError(Exception):
    """An engine did not start, or ended. It has the end of its log."""


class Engine:
    """A process that holds an engine, and answers what it is asked.

    serve: what the process calls, with a link, the path of the log, and `environment` and `options`. It sends something
    when the engine is ready, then an answer to each question that arrives, and ends after None.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        log: Path,
        environment: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> None:
        self.log = log
        self.link, theirs = multiprocessing.Pipe()
        arguments = theirs, str(log), environment, options
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()

    def _error(self, reason: str) -> EngineError:
        """The error to raise. The process is ended."""
        self.process.terminate()
        self.process.join(30)
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return EngineError(f"{reason}\n{text[-LOG_CHARACTERS:]}".strip())

    def receive(self, limit: float | None = None) -> Any:
        """What the process sends next, after this number of seconds at most. Raises EngineError."""
        try:
            if not self.link.poll(limit):
                raise self._error(f"no answer after {limit:.0f} s")
            return self.link.recv()
        except (EOFError, ConnectionError):
            raise self._error("the process ended") from None

    def ask(self, *question: Any) -> Any:
        """The answer of the process. Raises EngineError."""
        try:
            self.link.send(question)
        except ConnectionError:
            raise self._error("the process ended") from None
        return self.receive()

    def close(self) -> None:
        """End the process."""
        with suppress(ConnectionError):
            self.link.send(None)
        self.process.join(30)
        self.process.terminate()


def begin_engine(log: str, environment: Mapping[str, str]) -> None:
    """In the process of an engine: set variables, and write all output to a log."""
    os.environ.update(environment)
    with open(log, "w") as file:  # noqa: PTH123 - a path that travels as text
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def prompts_of(count: int, length: int, turn: int, vocabulary: int) -> list[list[int]]:
    """Random prompts that no earlier turn had, so that nothing is in a prefix cache. vocabulary: tokens are below."""
    draw = random.Random(f"{count} {length} {turn}")
    return [[draw.randrange(1000, vocabulary) for _ in range(length)] for _ in range(count)]


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(figures[name] for figures in turns) for name in turns[0]}


def say(text: str) -> None:
    """Print a line to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def check_cases(cases: Sequence[tuple[int, int]], tokens: int, requests: int, longest: int) -> None:
    """Raise UsageError for a case whose requests do not all run at once, or are too long with their answers.

    tokens: of an answer. requests, longest: the most requests of the engine, and the most tokens of one.
    """
    for count, length in cases:
        if count > requests or length + tokens > longest:
            expected = f"at most {requests} requests of {longest} tokens with their answers"
            raise click.UsageError(f"--cases: expected {expected}, got {count}x{length} and {tokens} tokens")


# ---------------------------------------------------------------- callbacks of options


def cases_of(_: click.Context, __: click.Parameter, text: str) -> list[tuple[int, int]]:
    """(requests, tokens of a prompt) of each case of "8x1024,64x1024"."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", case.strip()) for case in text.split(",")]
    shapes = [(int(case[1]), int(case[2])) for case in found if case]
    if len({*shapes}) < len(found):
        raise click.BadParameter(f"expected different cases such as 8x1024, got {text!r}")
    return shapes


def kinds_of(_: click.Context, __: click.Parameter, text: str | None) -> list[str] | None:
    """Kinds of layers; None for none."""
    kinds = text if text is None else text.split()
    if kinds is not None and not (kinds and {*kinds} <= KINDS.keys()):
        raise click.BadParameter(f"expected some of {', '.join(KINDS)}, with spaces between them, got {text!r}")
    return kinds


def object_of(_: click.Context, __: click.Parameter, text: str) -> dict[str, Any]:
    """A JSON object."""
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise click.BadParameter(f"expected a JSON object, got {text!r}")
