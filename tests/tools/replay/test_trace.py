from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4attn.errors import ArgumentError, TraceError
from dsv4attn.serving.request import HASH_BLOCK_TOKENS, Request
from dsv4attn.tools.replay.trace import generated_trace, read_trace, short_trace, shrink
from dsv4attn.tools.replay.trace_formats import MAX_REQUEST_TOKENS

REAL_TRACE = Path(__file__).parents[3] / ".." / "shared" / "data" / "mooncake_conversation_400.jsonl"

MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = "2023-11-16 18:15:46.6805900,374,44"
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST = "5,ChatGPT,472,18,490,Conversation log"


def write(folder: Path, *lines: str | bytes, end: bytes = b"\n") -> Path:
    path = folder / "trace"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + end for line in lines))
    return path


def mooncake(**changes: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]} | changes)


def problem_of(path: Path, *, line: int) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    return caught.value.problem


# what is read


def test_mooncake_lines_become_requests(tmp_path: Path) -> None:
    later = '{"timestamp": 1500, "input_length": 1, "output_length": 2, "session": "other fields are ignored"}'

    assert read_trace(write(tmp_path, MOONCAKE, later)) == [
        Request(0, 0.0, 600, 5, (0, 7)),
        Request(1, 1.5, 1, 2),
    ]


def bailian(**changes: object) -> str:
    """A line as the qwen-bailian traces have it: seconds, and blocks of 16 tokens."""
    fields = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132}
    return json.dumps(fields | {"type": "text", "turn": 1, "hash_ids": [*range(33)]} | changes)


def test_a_trace_in_seconds_with_blocks_of_16_tokens_is_read_where_it_is_said(tmp_path: Path) -> None:
    later = bailian(timestamp=65, hash_ids=[*range(32), 99])
    first, second = read_trace(write(tmp_path, bailian(), later), time_unit="s", block_tokens=16)

    assert (first.arrival_s, second.arrival_s) == (61.114, 65.0)
    assert first == Request(0, 61.114, 521, 132, tuple(range(33)), 16)
    assert shrink([first], 128) == [Request(0, 61.114, 102, 26, tuple(range(7)), 16)]
    # ids of full blocks alone, and none
    lines = write(tmp_path, bailian(hash_ids=[*range(32)]), bailian(hash_ids=[]))
    assert [len(request.hash_ids) for request in read_trace(lines, time_unit="s", block_tokens=16)] == [32, 0]


def test_fractions_of_milliseconds_are_read_where_they_are_said_to_be_milliseconds(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, mooncake(timestamp=1500.5)), time_unit="ms")[0].arrival_s == 1.5005


def test_units_of_mooncake_s_format_are_refused_for_a_csv_and_where_they_are_unknown(tmp_path: Path) -> None:
    path = write(tmp_path, BURST_HEADER, BURST)
    for units in ({"time_unit": "s"}, {"block_tokens": 16}):
        with pytest.raises(TraceError, match="a CSV in the format burstgpt -> leave out the time unit"):
            read_trace(path, **units)
    with pytest.raises(ArgumentError, match="time_unit: expected one of ms, s, got 'min'"):
        read_trace(path, time_unit="min")
    with pytest.raises(ArgumentError, match="block_tokens: expected an integer of at least 1, got 0"):
        read_trace(path, block_tokens=0)


def test_azure_rows_become_requests_counted_from_the_earliest(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE_HEADER,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16T19:15:51+01:00,10,1",
        end=b"\r\n",
    )

    assert read_trace(path) == [
        Request(0, 0.0, 374, 44),
        Request(1, 4.314579, 396, 109),
        Request(2, 4.31941, 10, 1),
    ]


def test_burstgpt_rows_become_requests_wherever_their_columns_stand(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"

    assert read_trace(write(tmp_path, BURST_HEADER, BURST)) == [Request(0, 5.0, 472, 18)]
    assert read_trace(write(tmp_path, header, "5.25,,1,GPT-4,100,10,110,API log")) == [Request(0, 5.25, 100, 10)]


def test_rows_that_generated_nothing_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, BURST_HEADER, "1,GPT-4,0,0,0,API log", BURST, "9,GPT-4,31,0,31,API log")

    assert read_trace(path) == [Request(0, 5.0, 472, 18)]


def test_requests_out_of_time_order_are_sorted_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [mooncake(timestamp=time, input_length=600 + place) for place, time in enumerate([20, 10, 20, 10])]

    requests = read_trace(write(tmp_path, *lines))

    assert [request.input_length for request in requests] == [601, 603, 600, 602]
    assert [request.index for request in requests] == [0, 1, 2, 3]


def test_max_requests_stops_reading_there(tmp_path: Path) -> None:
    path = write(tmp_path, BURST_HEADER, "1,GPT-4,0,0,0,API log", BURST, BURST, "garbage")

    assert len(read_trace(path, max_requests=2)) == 2
    assert "got 1" in problem_of(path, line=5)


def test_a_line_is_reported_and_nothing_returned_however_late_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path, *[MOONCAKE] * 50, mooncake(input_length=-3))

    assert problem_of(path, line=51) == "input_length: expected an integer of at least 1, got -3"


def test_blank_lines_at_the_end_and_a_byte_order_mark_are_tolerated(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, b"\xef\xbb\xbf" + MOONCAKE.encode(), "", "  ", ""))) == 1
    assert len(read_trace(write(tmp_path, b"\xef\xbb\xbf" + AZURE_HEADER.encode(), AZURE, ""))) == 1


def test_the_last_line_needs_no_line_end(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, MOONCAKE, end=b""))) == 1


def test_hash_ids_may_be_absent_or_those_of_full_blocks_where_their_size_is_said(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, mooncake(hash_ids=[]), mooncake(hash_ids=[4])), block_tokens=512)

    assert [request.hash_ids for request in requests] == [(), (4,)]


def test_the_longest_request_is_accepted(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(input_length=MAX_REQUEST_TOKENS - 5, hash_ids=[]))

    assert read_trace(path)[0].attention_tokens == MAX_REQUEST_TOKENS - 1


def test_the_real_mooncake_trace_is_read_whole() -> None:
    if not REAL_TRACE.exists():
        pytest.skip("the Mooncake trace lies beside the repository, in ../shared/data, and is not there")

    requests = read_trace(REAL_TRACE)

    assert len(requests) == 400
    assert max(request.input_length for request in requests) == 121_298
    assert all(len(request.hash_ids) == -(-request.input_length // HASH_BLOCK_TOKENS) for request in requests)
    assert read_trace(REAL_TRACE, max_requests=4) == requests[:4]


# what is refused

BAD_MOONCAKE = [
    (
        '{"timestamp": 0, "input_length": 5}',
        "output_length: missing field (this line has ['timestamp', 'input_length'])",
    ),
    ('{"input_length": 5, "output_length": 5}', "timestamp: missing field"),
    ('{"timestamp": 0, "output_len', "truncated or malformed JSON: Unterminated string starting at column 18"),
    (MOONCAKE + MOONCAKE, "truncated or malformed JSON: Extra data at column "),
    ('{"timestamp": 0, "input_length": ' + 5000 * "9" + "}", "malformed JSON: "),
    ("[" * 200_000, "malformed JSON: "),
    ("[0, 5, 5]", "expected a JSON object, got [0, 5, 5]"),
    (AZURE, "truncated or malformed JSON: "),
    (mooncake(input_length=True), "input_length: expected an integer of at least 1, got True"),
    (mooncake(input_length=3.5), "input_length: expected an integer of at least 1, got 3.5"),
    (mooncake(input_length="600"), "input_length: expected an integer of at least 1, got '600'"),
    (mooncake(input_length=None), "input_length: expected an integer of at least 1, got None"),
    (mooncake(input_length=0), "input_length: expected an integer of at least 1, got 0"),
    (mooncake(input_length=-1), "input_length: expected an integer of at least 1, got -1"),
    (mooncake(output_length=0), "output_length: expected an integer of at least 1, got 0"),
    (mooncake(output_length=-7), "output_length: expected an integer of at least 1, got -7"),
    (mooncake(output_length=[5]), "output_length: expected an integer of at least 1, got [5]"),
    (
        mooncake(input_length=MAX_REQUEST_TOKENS - 4),
        "input_length + output_length: expected at most 1048576 tokens together (the longest context of the models)",
    ),
    (mooncake(output_length=10**30), "input_length + output_length: expected at most 1048576 tokens"),
    (mooncake(timestamp=float("nan")), "timestamp: expected milliseconds from 0 to 2^53, got nan"),
    (mooncake(timestamp=float("inf")), "timestamp: expected milliseconds from 0 to 2^53, got inf"),
    (mooncake(timestamp=10**400), "timestamp: expected milliseconds from 0 to 2^53, got 1000"),
    (mooncake(timestamp=-1), "timestamp: expected milliseconds from 0 to 2^53, got -1"),
    (mooncake(timestamp=False), "timestamp: expected milliseconds from 0 to 2^53, got False"),
    (mooncake(timestamp="12"), "timestamp: expected milliseconds from 0 to 2^53, got '12'"),
    (mooncake(hash_ids=3), "hash_ids: expected a list of integers, got 3"),
    (mooncake(hash_ids=None), "hash_ids: expected a list of integers, got None"),
    (mooncake(hash_ids=[1, "2"]), "hash_ids[1]: expected an integer of at least 0, got '2'"),
    (mooncake(hash_ids=[-1]), "hash_ids[0]: expected an integer of at least 0, got -1"),
    (
        mooncake(hash_ids=[1, 2, 3]),
        "hash_ids: expected 2 ids, one for each 512 of the 600 prompt tokens, got 3 -> pass --trace-block-tokens",
    ),
    (mooncake(hash_ids=[1]), "hash_ids: expected 2 ids, one for each 512 of the 600 prompt tokens, got 1 -> pass"),
    (
        mooncake(timestamp=61.114),
        "timestamp: expected whole milliseconds, got 61.114 -> pass --trace-time-unit s if the trace counts seconds",
    ),
    (mooncake(timestamp=61.0), "timestamp: expected whole milliseconds, got 61.0 -> "),
    (b"\xff\xfe{", "not UTF-8 text (byte 0xff)"),
    ("x" * (1 << 20) + "y", "line longer than 1048576 bytes"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_MOONCAKE, ids=range(len(BAD_MOONCAKE)))
def test_a_bad_mooncake_line_is_named_with_its_number_and_field(
    tmp_path: Path, line: str | bytes, problem: str
) -> None:
    assert problem_of(write(tmp_path, MOONCAKE, line, MOONCAKE), line=2).startswith(problem)


BAD_AZURE = [
    ("2023-11-16 18:15:46.6805900,374", "expected 3 columns as in the header, got 2 (GeneratedTokens missing)"),
    (
        "2023-11-16 18:15:46.6805900",
        "expected 3 columns as in the header, got 1 (ContextTokens, GeneratedTokens missing)",
    ),
    ("2023-11-16 18:15:46.6805900,1,374,44", "expected 3 columns as in the header, got 4"),
    ("2023-11-16 18:15:46,,44", "ContextTokens: expected an integer of at least 1, got ''"),
    ("2023-11-16 18:15:46,3.5,44", "ContextTokens: expected an integer of at least 1, got '3.5'"),
    ("2023-11-16 18:15:46,1_0,44", "ContextTokens: expected an integer of at least 1, got '1_0'"),
    ("2023-11-16 18:15:46,0,44", "ContextTokens: expected an integer of at least 1, got 0"),
    ("2023-11-16 18:15:46,-9,44", "ContextTokens: expected an integer of at least 1, got -9"),
    ("2023-11-16 18:15:46,9,nan", "GeneratedTokens: expected an integer of at least 0, got 'nan'"),
    ("2023-11-16 18:15:46,9,-1", "GeneratedTokens: expected an integer of at least 0, got -1"),
    ("2023-11-16 18:15:46,-9,0", "ContextTokens: expected an integer of at least 0, got -9"),
    ("2023-11-16 18:15:46,1048576,1", "ContextTokens + GeneratedTokens: expected at most 1048576 tokens"),
    ("2023-11-16 18:15:46,9" + 40 * "0" + ",1", "ContextTokens: expected an integer of at least 1, got '9000"),
    ("yesterday,374,44", "TIMESTAMP: expected a date and time such as 2023-11-16 18:15:46.6805900, got 'yesterday'"),
    (
        "2023-13-16 18:15:46,374,44",
        "TIMESTAMP: expected a date and time such as 2023-11-16 18:15:46.6805900, got '2023-13",
    ),
    ("5,374,44", "TIMESTAMP: expected a date and time"),
    (",374,44", "TIMESTAMP: expected a date and time"),
    ('"2023-11-16 18:15:46,374,44', "malformed CSV: "),
    (b"2023-11-16 18:15:46,\xff,44", "not UTF-8 text (byte 0xff)"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_AZURE, ids=range(len(BAD_AZURE)))
def test_a_bad_azure_row_is_named_with_its_number_and_column(tmp_path: Path, line: str | bytes, problem: str) -> None:
    assert problem_of(write(tmp_path, AZURE_HEADER, AZURE, line, AZURE), line=3).startswith(problem)


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "-5", "", "noon", "1_0"])
def test_a_bad_burstgpt_timestamp_is_named(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, BURST_HEADER, BURST, f"{value},GPT-4,1,1,2,API log")

    assert problem_of(path, line=3).startswith("Timestamp: expected seconds from 0 to 2^53, got ")


def test_a_blank_line_between_records_is_a_missing_record(tmp_path: Path) -> None:
    assert "a record is missing" in problem_of(write(tmp_path, MOONCAKE, "", "", MOONCAKE), line=2)


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ("TIMESTAMP,ContextToken,GeneratedTokens", ["column 'ContextToken'; did you mean 'ContextTokens'?"]),
        ("Timestamp,request_tokens,Response tokens", ["column 'request_tokens'; did you mean 'Request tokens'?"]),
        (
            "5,ChatGPT,472,18,490,Conversation log",
            ["TIMESTAMP,ContextTokens", "Timestamp,Request tokens", "JSON object"],
        ),
        ("version https://git-lfs.github.com/spec/v1", ["Git LFS pointer", "git lfs pull"]),
        ("[", ["JSON array", "one request a line"]),
        (b"\x1f\x8b\x08\x00", ["compressed", "unpack it first"]),
        (b"\xff\xfe", ["not UTF-8 text"]),
    ],
)
def test_an_unknown_first_line_says_what_was_expected(tmp_path: Path, header: str | bytes, parts: list[str]) -> None:
    problem = problem_of(write(tmp_path, header, AZURE), line=1)

    assert all(part in problem for part in parts), problem


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    assert "the file is empty" in problem_of(write(tmp_path), line=1)
    assert "the file is empty" in problem_of(write(tmp_path, "", ""), line=1)
    assert "nothing follows its header" in problem_of(write(tmp_path, AZURE_HEADER), line=1)
    failed = write(tmp_path, BURST_HEADER, "1,GPT-4,0,0,0,API log")
    assert "each of its 1 rows has 0 generated tokens" in problem_of(failed, line=2)


def test_a_missing_file_and_a_directory_are_refused_as_a_whole(tmp_path: Path) -> None:
    assert "cannot be read: No such file or directory -> give a file" in problem_of(tmp_path / "absent.jsonl", line=0)
    assert "cannot be read: Is a directory -> give a file" in problem_of(tmp_path, line=0)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE)
    path.chmod(0)

    assert "cannot be read: Permission denied" in problem_of(path, line=0)


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_max_requests_must_be_a_positive_integer(tmp_path: Path, value: int) -> None:
    with pytest.raises(ArgumentError, match="max_requests: expected an integer of at least 1"):
        read_trace(tmp_path / "not even opened", max_requests=value)


@given(st.binary(max_size=300))
def test_no_bytes_whatever_escape_as_another_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    for start in (b"", MOONCAKE.encode() + b"\n", AZURE_HEADER.encode() + b"\n"):
        path.write_bytes(start + data)
        try:
            requests = read_trace(path)
        except TraceError:
            continue
        assert requests


# the request itself


@pytest.mark.parametrize("field", ["index", "input_length", "output_length"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_a_request_cannot_be_made_of_bad_numbers(field: str, value: int) -> None:
    numbers = {"index": 0, "input_length": 1, "output_length": 1} | {field: value}

    with pytest.raises(ArgumentError, match=rf"Request\.{field}: expected an integer of at least"):
        Request(numbers["index"], 0.0, numbers["input_length"], numbers["output_length"])


def test_a_request_cannot_arrive_at_no_time() -> None:
    with pytest.raises(ArgumentError, match=r"Request\.arrival_s: expected a finite number of seconds, got nan"):
        Request(0, float("nan"), 1, 1)


# shrinking


def test_shrink_leaves_short_requests_alone() -> None:
    request = Request(3, 1.0, 1000, 24, (1, 2))

    assert shrink([request], 1024) == [request]


def test_shrink_keeps_the_ratio_and_the_blocks_still_covered() -> None:
    request = Request(3, 1.0, 3000, 1000, (1, 2, 3, 4, 5, 6))

    assert shrink([request], 2048) == [Request(3, 1.0, 1536, 512, (1, 2, 3))]
    assert shrink([request], 1366) == [Request(3, 1.0, 1025, 341, (1, 2, 3))]


@given(
    prompt=st.integers(1, 5000),
    output=st.integers(1, 5000),
    max_tokens=st.integers(2, 6000),
)
@example(prompt=704, output=704, max_tokens=949)
def test_a_shrunk_request_has_exactly_the_tokens_asked_for_and_the_nearest_ratio(
    prompt: int, output: int, max_tokens: int
) -> None:
    ids = tuple(range(-(-prompt // HASH_BLOCK_TOKENS)))
    (small,) = shrink([Request(0, 0.0, prompt, output, ids)], max_tokens)

    assert small.input_length + small.output_length == min(prompt + output, max_tokens)
    assert small.hash_ids == tuple(range(-(-small.input_length // HASH_BLOCK_TOKENS)))
    exact = prompt * min(Fraction(1), Fraction(max_tokens, prompt + output))
    assert abs(small.input_length - exact) <= Fraction(1, 2) or 1 in (small.input_length, small.output_length)


@pytest.mark.parametrize("value", [1, 0, -4, 2.5])
def test_shrink_needs_room_for_a_prompt_and_an_output_token(value: int) -> None:
    with pytest.raises(ArgumentError, match="max_tokens: expected an integer of at least 2"):
        shrink([], value)


# the built-in trace


@given(st.integers(0, 2**32))
def test_a_generated_trace_touches_the_interesting_lengths(seed: int) -> None:
    requests = generated_trace(seed)
    lengths = sorted(request.input_length for request in requests)

    assert len(requests) == 6
    assert lengths[0] == 1
    assert 127 in lengths
    assert {128, 129} & set(lengths)
    assert len([length for length in lengths if length > HASH_BLOCK_TOKENS]) == 2
    assert lengths[-1] <= 1500
    assert all(2 <= request.output_length <= 24 for request in requests)
    assert [request.index for request in requests] == list(range(6))
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    assert requests[-1].arrival_s <= 0.2
    assert requests == generated_trace(seed)


@given(st.integers(0, 2**32))
def test_a_short_trace_has_one_prompt_of_two_long_entries_that_does_not_come_first(seed: int) -> None:
    requests = short_trace(seed)
    lengths = [request.input_length for request in requests]

    assert len(requests) == 4
    assert 2 * 128 < max(lengths[1:]) <= 320
    assert {1, 127} <= set(lengths)
    assert all(2 <= request.output_length <= 4 for request in requests)
    assert requests == short_trace(seed)


def test_long_generated_requests_share_their_first_block_and_no_other() -> None:
    requests = generated_trace(5, n=12)
    ids = [identity for request in requests for identity in request.hash_ids]

    assert ids.count(0) == 4
    assert sorted(set(ids) - {0}) == sorted(identity for identity in ids if identity)
    assert all(len(request.hash_ids) == -(-request.input_length // HASH_BLOCK_TOKENS) for request in requests)


def test_generated_traces_differ_by_seed_and_have_the_length_asked_for() -> None:
    assert generated_trace(0) != generated_trace(1)
    assert [len(generated_trace(0, n=n)) for n in (1, 5, 7, 100)] == [1, 5, 7, 100]
    with pytest.raises(ArgumentError, match="n: expected an integer of at least 1, got 0"):
        generated_trace(0, n=0)
