"""What both commands share that measure an engine with dsv4attn and without: on_gpu/measure_serving.py of two wheels.

This module imports neither an engine nor torch.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
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


def start_engine(
    serve: Callable[..., None], log: Path, environment: Mapping[str, str], options: Mapping[str, Any]
) -> tuple[BaseProcess, Connection]:
    """Start a process that calls `serve` with a link, then these arguments; return it, and the link's other end."""
    link, theirs = multiprocessing.Pipe()
    arguments = theirs, str(log), environment, options
    process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
    process.start()
    theirs.close()
    return process, link


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


# ---------------------------------------------------------------- callbacks of options


def cases_of(
    _: click.Context, __: click.Parameter, text: str, *, requests: float = math.inf, limit: str = ""
) -> list[tuple[int, int]]:
    """(requests, tokens of a prompt) of each case of "8x1024,64x1024". requests: most of a case, as `limit` says."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", case.strip()) for case in text.split(",")]
    shapes = [(int(case[1]), int(case[2])) for case in found if case]
    if len({*shapes}) < len(found) or any(count > requests for count, _ in shapes):
        raise click.BadParameter(f"expected different cases such as 8x1024{limit}, got {text!r}")
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
