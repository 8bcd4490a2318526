"""The published trace formats. `detect` looks at the first line; `TraceFormat.parse` turns a line into a `TraceRow`.

A bad line raises a `BadLineError` that names the field; `trace` adds the file and the line number.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from reprlib import repr as short

from attrs import frozen

from dsv4attn.errors import did_you_mean
from dsv4attn.serving.request import HASH_BLOCK_TOKENS, hash_blocks

MAX_REQUEST_TOKENS = 1 << 20
"""Longest prompt plus output of one request: the context length of the models (1,048,576 tokens)."""

TIME_UNITS = {"ms": 1000, "s": 1}
"""Units of `timestamp` in Mooncake's format, and how many of them a second has."""

_MAX_TIMESTAMP = 1 << 53
_CSV_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_ISO_TIME = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d)[ T](?P<clock>\d\d:\d\d:\d\d)(\.(?P<fraction>\d{1,9}))?(?P<zone>Z|[-+]\d\d:\d\d)?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class BadLineError(Exception):
    """A line cannot be parsed; the message names the field."""


@frozen
class TraceRow:
    """One record of a trace file.

    arrival: in units of its `TraceFormat`.
    input_length: prompt tokens.
    output_length: tokens to generate.
    hash_ids: ids of the prompt's blocks, or none.
    """

    arrival: int | float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@frozen
class MooncakeUnits:
    """Units of a trace in Mooncake's format, which other published traces use with other units.

    time: "ms" or "s". None reads integers as milliseconds and refuses other numbers.
    block_tokens: prompt tokens of one entry of `hash_ids`. None reads 512 and refuses a prompt whose number of ids says
       something else. With a number, ids may also be those of full blocks alone.
    """

    time: str | None = None
    block_tokens: int | None = None


@frozen
class TraceFormat:
    """A trace format.

    name: `mooncake`, `azure` or `burstgpt`.
    unit: units of `TraceRow.arrival` in one second.
    relative: whether arrivals count from the earliest request instead of the trace's own zero.
    has_header: whether the first line is a header and not a record.
    parse: turns one line into a row, or into None when the line is to be skipped.
    """

    name: str
    unit: int
    relative: bool
    has_header: bool
    parse: Callable[[str], TraceRow | None]


def detect(text: str, units: MooncakeUnits) -> TraceFormat:
    """Recognise the format by the first line of the file. units: of Mooncake's format."""
    start = text.lstrip()[:1]
    if start == "{":
        parse = partial(_parse_mooncake, units=units)
        return TraceFormat("mooncake", TIME_UNITS[units.time or "ms"], relative=False, has_header=False, parse=parse)
    if start == "[":
        raise BadLineError("expected one JSON object a line, got a JSON array -> write one request a line")
    columns = _csv_fields(text)
    lower = [column.lower() for column in columns]
    for name, columns_of_format in _CSV_COLUMNS.items():
        if all(column.lower() in lower for column in columns_of_format):
            azure = name == "azure"
            table = _Csv(lower, columns_of_format, _iso_nanoseconds if azure else _seconds)
            return TraceFormat(name, unit=10**9 if azure else 1, relative=azure, has_header=True, parse=table.parse)
    raise BadLineError(_header_problem(text, columns))


def _header_problem(text: str, columns: Sequence[str]) -> str:
    if text.startswith("version https://git-lfs"):
        return "this is a Git LFS pointer, not the trace -> run `git lfs pull` where it came from"
    expected_columns = [column for columns_of_format in _CSV_COLUMNS.values() for column in columns_of_format]
    unknown = [column for column in columns if column.lower() not in {name.lower() for name in expected_columns}]
    named = ((column, did_you_mean(column, expected_columns)) for column in unknown)
    guesses = [f"; column {short(column)}{guess}" for column, guess in named if guess]
    forms = " or ".join(f"'{','.join(columns_of_format)}' ({name})" for name, columns_of_format in _CSV_COLUMNS.items())
    expected = f"expected a header with {forms}, or a JSON object a line (mooncake)"
    return f"unrecognised header {short(text)}: {expected}{''.join(guesses[:3])}"


def _parse_mooncake(text: str, units: MooncakeUnits) -> TraceRow:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise BadLineError(f"truncated or malformed JSON: {what} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise BadLineError(f"malformed JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadLineError(f"expected a JSON object, got {short(record)}")
    for name in ("timestamp", "input_length", "output_length"):
        if name not in record:
            raise BadLineError(f"{name}: missing field (this line has {short(list(record))})")
    row = TraceRow(
        _timestamp("timestamp", record["timestamp"], "seconds" if units.time == "s" else "milliseconds"),
        _integer("input_length", record["input_length"], 1),
        _integer("output_length", record["output_length"], 1),
        _hash_ids(record.get("hash_ids", [])),
    )
    _check_total("input_length + output_length", row)
    if units.time is None and not isinstance(row.arrival, int):
        cure = "pass --trace-time-unit s if the trace counts seconds, or ms (`time_unit` in Python)"
        raise BadLineError(f"timestamp: expected whole milliseconds, got {short(row.arrival)} -> {cure}")
    _check_blocks(row, units)
    return row


def _check_blocks(row: TraceRow, units: MooncakeUnits) -> None:
    """Refuse a number of hash ids that contradicts the tokens of a block."""
    size = units.block_tokens or HASH_BLOCK_TOKENS
    blocks = hash_blocks(row.input_length, size)
    allowed = {0, blocks} if units.block_tokens is None else {0, blocks, row.input_length // size}
    if len(row.hash_ids) not in allowed:
        expected = f"{blocks} ids, one for each {size} of the {row.input_length} prompt tokens"
        cure = "pass --trace-block-tokens if blocks have another size (`block_tokens` in Python)"
        raise BadLineError(f"hash_ids: expected {expected}, got {len(row.hash_ids)} -> {cure}")


@frozen
class _Csv:
    """columns: of the file, in small letters. names: of the arrival, the prompt's tokens and the output's."""

    columns: Sequence[str]
    names: tuple[str, str, str]
    arrival: Callable[[str, str], int | float]

    def parse(self, text: str) -> TraceRow | None:
        cells = _csv_fields(text)
        when, prompt, output = self.names
        if len(cells) != len(self.columns):
            absent = [name for name in self.names if self.columns.index(name.lower()) >= len(cells)]
            missing = f" ({', '.join(absent)} missing)" if absent else ""
            raise BadLineError(f"expected {len(self.columns)} columns as in the header, got {len(cells)}{missing}")
        arrived, prompted, generated = (cells[self.columns.index(name.lower())] for name in self.names)
        arrival, outputs = self.arrival(when, arrived), _integer(output, _as_number(generated), 0)
        row = TraceRow(arrival, _integer(prompt, _as_number(prompted), 1 if outputs else 0), outputs)
        _check_total(f"{prompt} + {output}", row)
        return row if outputs else None


def _csv_fields(text: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise BadLineError(f"malformed CSV: {error}") from None


def _as_number(text: str) -> int | str:
    return int(text) if _INTEGER.fullmatch(text) else text


def _integer(name: str, value: object, minimum: int) -> int:
    if type(value) is not int or value < minimum:
        raise BadLineError(f"{name}: expected an integer of at least {minimum}, got {short(value)}")
    return value


def _check_total(name: str, row: TraceRow) -> None:
    total = row.input_length + row.output_length
    if total > MAX_REQUEST_TOKENS:
        expected = f"at most {MAX_REQUEST_TOKENS} tokens together (the longest context of the models)"
        raise BadLineError(f"{name}: expected {expected}, got {short(total)}")


def _hash_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadLineError(f"hash_ids: expected a list of integers, got {short(value)}")
    return tuple(_integer(f"hash_ids[{place}]", item, 0) for place, item in enumerate(value))


def _timestamp(name: str, value: object, unit: str) -> int | float:
    # bool is an int and NaN is a float; the comparison refuses NaN and both infinities
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_TIMESTAMP:
        raise BadLineError(f"{name}: expected {unit} from 0 to 2^53, got {short(value)}")
    return value


def _seconds(name: str, text: str) -> int | float:
    return _timestamp(name, float(text) if _DECIMAL.fullmatch(text) else text, "seconds")


def _iso_nanoseconds(name: str, text: str) -> int:
    problem = f"{name}: expected a date and time such as 2023-11-16 18:15:46.6805900, got {short(text)}"
    match = _ISO_TIME.fullmatch(text)
    if match is None:
        raise BadLineError(problem)
    try:
        zone = (match["zone"] or "Z").replace("Z", "+00:00")
        moment = datetime.fromisoformat(f"{match['day']} {match['clock']}{zone}")
    except ValueError as error:
        raise BadLineError(f"{problem} ({error})") from None
    return (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + int((match["fraction"] or "").ljust(9, "0"))
