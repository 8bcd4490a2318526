"""A request of a trace: arrival, prompt and output lengths, and hash ids of shared prompt blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from attrs import Attribute, field, frozen

from dsv4attn.core.argument_checks import check_count
from dsv4attn.errors import ArgumentError

__all__ = ["HASH_BLOCK_TOKENS", "Request", "hash_blocks"]

HASH_BLOCK_TOKENS = 512
"""Prompt tokens of one entry of `Request.hash_ids`, where nothing else is said."""


def hash_blocks(tokens: int, block_tokens: int = HASH_BLOCK_TOKENS) -> int:
    """Return how many hash blocks a prompt touches; the last one may be partly filled."""
    return -(-tokens // block_tokens)


def _at_least(minimum: int) -> Callable[[Any, Attribute[int], int], object]:
    return lambda _, attribute, value: check_count(f"Request.{attribute.name}", value, minimum)


def _as_tuple(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _finite(_: object, attribute: Attribute[float], value: float) -> None:
    if not math.isfinite(value):
        raise ArgumentError(f"Request.{attribute.name}", expected="a finite number of seconds", actual=value)


@frozen
class Request:
    """One request of a trace.

    index: position in arrival order, counted from 0; identifies the request within its trace.
    arrival_s: arrival in seconds on the trace's own clock (Azure: since its earliest request).
    input_length: prompt tokens.
    output_length: tokens to generate; the first one is the output of the step that finishes the prompt.
    hash_ids: ids of the prompt's blocks, equal ids meaning equal tokens; empty when the trace has none.
    hash_block_tokens: prompt tokens of one entry of `hash_ids`.
    """

    index: int = field(validator=_at_least(0))
    arrival_s: float = field(converter=float, validator=_finite)
    input_length: int = field(validator=_at_least(1))
    output_length: int = field(validator=_at_least(1))
    hash_ids: tuple[int, ...] = field(default=(), converter=_as_tuple)
    hash_block_tokens: int = field(default=HASH_BLOCK_TOKENS, validator=_at_least(1))

    @property
    def attention_tokens(self) -> int:
        """Tokens that pass through attention: the last output token is never fed back."""
        return self.input_length + self.output_length - 1
