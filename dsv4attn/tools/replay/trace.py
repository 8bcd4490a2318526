"""Request traces: reading the published formats, shrinking them, and small built-in ones.

The format is found by content, never by file name:

- *Mooncake*: one JSON object a line, `timestamp` (milliseconds), `input_length`, `output_length`, and optionally
  `hash_ids`, the ids of the prompt's 512-token blocks (equal ids = equal tokens). Other fields are ignored. Other
  published traces have the same fields with seconds, or with blocks of another size: see `time_unit` and
  `block_tokens` of `load_trace`.
- *Azure* CSV: columns `TIMESTAMP` (ISO date and time, up to nine fractional digits, UTC unless an offset is written),
  `ContextTokens`, `GeneratedTokens`.
- *BurstGPT* CSV: columns `Timestamp` (seconds), `Request tokens`, `Response tokens`. Further columns are ignored.

Requests are returned only after every requested line was parsed. Three properties of real logs are accepted on
purpose: requests out of time order are sorted by arrival (stable); blank lines at the end are dropped; a CSV row with
0 generated tokens is a request that failed where it was recorded (BurstGPT contains such rows), so it is skipped.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from attrs import evolve

from dsv4attn.core.argument_checks import check_count
from dsv4attn.errors import ArgumentError, TraceError
from dsv4attn.serving.request import HASH_BLOCK_TOKENS, Request, hash_blocks
from dsv4attn.tools.replay.trace_formats import TIME_UNITS, BadLineError, MooncakeUnits, TraceFormat, TraceRow, detect

STDIN = "-"
"""The path that means standard input."""
_MAX_LINE_BYTES = 1 << 20
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"BZh")


def read_trace(
    path: str | os.PathLike[str],
    *,
    max_requests: int | None = None,
    time_unit: str | None = None,
    block_tokens: int | None = None,
) -> list[Request]:
    """Requests of a trace file, or of standard input for `-`, in arrival order; this module describes the formats.

    max_requests: reading stops after that many requests in file order; later lines are not read.
    time_unit: "ms" or "s", of `timestamp` in Mooncake's format. By default milliseconds, and a timestamp that is not a
       whole number is refused, because traces that have them count seconds.
    block_tokens: prompt tokens of an entry of `hash_ids` in Mooncake's format. By default 512, and a prompt with
       another number of ids is refused.
    Raises `TraceError` with the 1-based line (0: the file as a whole) and the field at fault, also where one of the two
    units is given for a CSV, and `ArgumentError` for bad arguments.
    """
    if max_requests is not None:
        check_count("max_requests", max_requests, 1)
    if block_tokens is not None:
        check_count("block_tokens", block_tokens, 1)
    if time_unit is not None and time_unit not in TIME_UNITS:
        raise ArgumentError("time_unit", expected=f"one of {', '.join(TIME_UNITS)}", actual=repr(time_unit))
    units = MooncakeUnits(time_unit, block_tokens)
    name = os.fspath(path)
    try:
        if name == STDIN:
            name = "standard input"
            form, rows = _read_rows(name, sys.stdin.buffer, max_requests, units)
        else:
            with Path(name).open("rb") as file:
                form, rows = _read_rows(name, file, max_requests, units)
    except OSError as error:
        cure = "give a file: Mooncake JSON lines, or an Azure or BurstGPT CSV"
        raise TraceError(name, 0, f"cannot be read: {error.strerror or error} -> {cure}") from error
    rows.sort(key=lambda row: row.arrival)
    start = rows[0].arrival if form.relative else 0
    arrivals, size = [(row.arrival - start) / form.unit for row in rows], block_tokens or HASH_BLOCK_TOKENS
    return [Request(i, arrivals[i], r.input_length, r.output_length, r.hash_ids, size) for i, r in enumerate(rows)]


def _read_rows(
    name: str, file: IO[bytes], max_requests: int | None, units: MooncakeUnits
) -> tuple[TraceFormat, list[TraceRow]]:
    form: TraceFormat | None = None
    rows: list[TraceRow] = []
    number = skipped = 0
    for number, text in _numbered_lines(name, file):
        try:
            if form is None:
                form = detect(text, units)
                if form.has_header and units != MooncakeUnits():
                    cure = "leave out the time unit and the tokens of a block: they are of Mooncake's format"
                    raise TraceError(name, number, f"this is a CSV in the format {form.name} -> {cure}")
                if form.has_header:
                    continue
            row = form.parse(text)
        except BadLineError as bad:
            raise TraceError(name, number, str(bad)) from None
        if row is None:
            skipped += 1
        else:
            rows.append(row)
            if len(rows) == max_requests:
                break
    if form is None:
        raise TraceError(name, 1, "the file is empty: expected at least one request")
    if not rows:
        why = f"each of its {skipped} rows has 0 generated tokens" if skipped else "nothing follows its header"
        raise TraceError(name, number, f"the trace holds no request: {why}")
    return form, rows


def _numbered_lines(name: str, file: IO[bytes]) -> Iterator[tuple[int, str]]:
    """Yield every line that is not blank with its number; blank lines are allowed only at the end."""
    blank = 0
    # a bounded read, so that a file without line ends is refused before it fills the memory
    for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
        if number == 1 and raw.startswith(_COMPRESSED):
            raise TraceError(name, number, "the file is compressed -> unpack it first")
        if len(raw) > _MAX_LINE_BYTES:
            raise TraceError(name, number, f"line longer than {_MAX_LINE_BYTES} bytes: this is not a trace")
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 text (byte 0x{error.object[error.start]:02x})"
            raise TraceError(name, number, problem) from None
        if not text.strip():
            blank = blank or number
        elif blank:
            raise TraceError(name, blank, "blank line before the end of the trace: a record is missing")
        else:
            yield number, text


def shrink(requests: Iterable[Request], max_tokens: int) -> list[Request]:
    """Shrink every longer request to exactly `max_tokens`, prompt plus output.

    The ratio of prompt to output stays the same as far as whole tokens allow, with at least one of each. `hash_ids` has
    the blocks that the shorter prompt touches.
    """
    check_count("max_tokens", max_tokens, 2)
    return [_shrunk(request, max_tokens) for request in requests]


def _shrunk(request: Request, max_tokens: int) -> Request:
    total = request.input_length + request.output_length
    if total <= max_tokens:
        return request
    nearest = (2 * request.input_length * max_tokens + total) // (2 * total)
    prompt = min(max(nearest, 1), max_tokens - 1)
    ids = request.hash_ids[: hash_blocks(prompt, request.hash_block_tokens)]
    return evolve(request, input_length=prompt, output_length=max_tokens - prompt, hash_ids=ids)


def generated_trace(seed: int, n: int = 6) -> list[Request]:
    """Return a small synthetic trace, the same for the same arguments.

    Every six requests hold a 1-token prompt, prompts on both sides of the 128-token window, a short one, and two longer
    than one 512-token block, which share that first block. They arrive within milliseconds, in an order drawn from the
    seed.
    """
    check_count("n", n, 1)
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    lengths: list[int] = []
    while len(lengths) < n:
        six = [1, 127, rng.choice((128, 129)), rng.randint(20, 120), rng.randint(513, 700), rng.randint(1025, 1500)]
        rng.shuffle(six)
        lengths += six
    return _arriving(lengths[:n], 24, rng)


def short_trace(seed: int, n: int = 4) -> list[Request]:
    """Return the smallest synthetic trace that has every kind of step, the same for the same arguments.

    Every four requests hold a 1-token prompt, one that is a token short of the window, a short one, and one of more
    than two 128-token entries. The longest prompt never comes first: others decode while it is prefilled.
    """
    return _with_long_prompts(seed, 264, n, most_outputs=4)


def selecting_trace(seed: int, tokens: int, n: int = 4) -> list[Request]:
    """Return a small synthetic trace with prompts that are a little longer than `tokens`.

    tokens: the shortest prompt of which an indexer leaves entries out. Every four requests hold a 1-token prompt, one
    that is a token short of the window, a short one, and a long one, which never comes first: others decode while it is
    prefilled. They arrive as those of `generated_trace`, and end sooner.
    """
    check_count("tokens", tokens, 1)
    return _with_long_prompts(seed, tokens, n, most_outputs=8)


def _with_long_prompts(seed: int, tokens: int, n: int, *, most_outputs: int) -> list[Request]:
    """Return n requests: one in four has a prompt a little longer than `tokens`. most_outputs: tokens of an output."""
    check_count("n", n, 1)
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    lengths: list[int] = []
    while len(lengths) < n:
        four = [1, 127, rng.randint(20, 60)]
        rng.shuffle(four)
        four.insert(rng.randint(1, 3), tokens + rng.randint(8, 40))
        lengths += four
    return _arriving(lengths[:n], most_outputs, rng)


def _arriving(lengths: list[int], most: int, rng: random.Random) -> list[Request]:
    """Requests with prompts of these lengths and 2 to `most` output tokens, a few milliseconds apart."""
    requests: list[Request] = []
    arrival_ms, next_id = 0, 1
    for index, length in enumerate(lengths):
        ids = list(range(next_id, next_id + hash_blocks(length)))
        next_id += len(ids)
        if length > HASH_BLOCK_TOKENS:
            ids[0] = 0
        requests.append(Request(index, arrival_ms / 1000, length, rng.randint(2, most), tuple(ids)))
        arrival_ms += rng.randint(0, 20)
    return requests
