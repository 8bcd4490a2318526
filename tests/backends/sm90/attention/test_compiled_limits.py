"""Kernels of the sm90 backend, compiled without a card: nothing spills, no product waits for another, a block fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.backends._triton.compiling.aot import Resources
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends.sm90.attention.kernels_schedule import NIBBLE_PAGES
from dsv4attn.backends.sm90.tuning import BF16_ROWS_ROLES, RAW_Q_ROLES, V4_PAGES_ROLES, V41_PAGES_ROLES
from tests.backends._triton.compiling.gates import broken_limits
from tests.programs import run_compiling, told_by

COMPILES = str(Path(__file__).with_name("compiles.py"))
FILE = 65536
"""Registers of a multiprocessor."""


@pytest.mark.slow
def test_what_a_step_asks_for_keeps_every_limit() -> None:
    """Slow, as `test_every_form_keeps_every_limit` compiles forms with more results."""
    assert broken_limits("sm90", ["sm_90"], "--kernel", "attention", "--kernel", "combine_parts") == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["e4m3fn", "bfloat16"])
@pytest.mark.parametrize("model", ["flash", "pro"])
def test_every_kernel_keeps_every_limit(model: str, dtype: str) -> None:
    assert broken_limits("sm90", ["sm_90"], "--model", model, "--dtype", dtype) == []


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, marks=pytest.mark.matrix) for words in ("fullest 64", "barest 64")),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("64", "128", "100")),
    ],
)
def test_every_form_keeps_every_limit(words: str) -> None:
    """Slow but for ten forms of one block of heads that tell every result, and six that tell none, without sinks.

    Of the forms of one tile, below, four of V4's records are compiled in the default run.
    """
    variants = told_by(COMPILES, *words.split())
    attention = {name: form for name, form in variants.items() if name.startswith("attention")}

    # keys of V4.1 take some registers more than their role has with Triton 3.9, and some forms one with 3.6. V4's of 4
    # bits do with Triton 3.9 and two blocks of heads: mostly numbers that all roles get from before they begin
    may_spill = {name for name in variants if is_coded(name) or (has_nibbles(name) and words in ("100", "128"))}
    assert {name: form["reasons"] for name, form in variants.items() if form["reasons"] and name not in may_spill} == {}
    spills = [reason for name in may_spill for reason in variants[name]["reasons"]]
    assert [reason for reason in spills if not re.match(r"SPILLS  \d\d? bytes stored and 1?\d?\d loaded", reason)] == []
    assert len(attention) == {"fullest": 10, "barest": 6}.get(words.partition(" ")[0], 48)
    combining = [form for name, form in variants.items() if name.startswith("combine_parts")]
    # sixteen bytes at a time: half of what a thread adds up of each of two parts
    assert {form["loaded"] for form in combining} == {8}
    for name, form in attention.items():
        paged = "window_keys:*u8" in name
        roles = (
            (V41_PAGES_ROLES if is_coded(name) else V4_PAGES_ROLES)
            if paged
            else RAW_Q_ROLES
            if "positions:*i64" in name
            else BF16_ROWS_ROLES
        )
        assert form["roles"] == [[*role] for role in roles.block], name
        assert sum(32 * warps * registers for warps, registers in form["roles"]) <= FILE
        assert form["shared"] <= 232_448
        assert form["occupancy"] == 1
        # sixteen bytes at a time, in and out; but scales of eight bytes, indices, and words of scales of nibbles
        assert form["copied"] == ([4, 8, 16] if roles is V4_PAGES_ROLES else [4, 16] if "KIND=3" in name else [16])
        # of 512 columns, whole rows and parts sixteen bytes at a time, and a word of powers for each of a part
        assert (form["stored"], form["powers_stored"]) == (2 * 4 * 8, 4 * 8)
        assert form["narrow"] == 0
        # of two rows, which are asked about: nothing else that a branch skips. On pages four times 128 columns, on rows
        # two roles, two tiles, and half of a thread's sums at a time
        assert form["factors"] == [2] * (4 if paged else 8)
        # the matrix unit reads rows where copies have written them; on pages q, weights, and tiles
        assert form["announced"] == 3 if paged else form["unfenced"] == 0


@pytest.mark.slow
def test_forms_for_groups_of_rows_keep_every_limit_but_that_they_spill_what_a_group_has() -> None:
    forms = told_by(COMPILES, "grouped", "8", "32")

    assert {name: form["reasons"] for name, form in forms.items() if form["reasons"]} == {}
    attention = [form for name, form in forms.items() if name.startswith("attention")]
    assert len(attention) == 4
    for form in attention:
        assert form["roles"] == [[*role] for role in V4_PAGES_ROLES.block]
        assert (form["stored"], form["powers_stored"]) == (2 * 4 * 8, 4 * 8)
        assert form["copied"] == [4, 8, 16]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("records", "heads", "counts"),
    [
        ("fullest_tiles", "64", (4, 4)),
        pytest.param("fullest_coded_tiles", "64", (8, 4), marks=pytest.mark.matrix),
        pytest.param("tiles", "16 64 100 128", (4 * 8, 8), marks=pytest.mark.slow),
        pytest.param("coded_tiles", "16 64 100 128", (4 * 20, 8), marks=pytest.mark.slow),
    ],
)
def test_every_form_of_one_tile_keeps_every_limit(records: str, heads: str, counts: tuple[int, int]) -> None:
    """Slow but for those of one block of heads with two segments that tell every result: they need the most."""
    forms = told_by(COMPILES, records, *heads.split())

    assert [form for form in forms if form["reasons"]] == []
    attending = [form for form in forms if form["name"] == "attend_tile"]
    combining = [form for form in forms if form["name"] == "combine_tiles"]
    assert (len(attending), len(combining)) == counts
    for form in attending:
        # two programs of 64 keys on a multiprocessor; sums eight bytes at a time, a key's codes and its rope sixteen
        assert form["occupancy"] == (2 if form["N"] == 64 else 1)
        assert form["parts_stored"] == form["BH"] // 2
        # of records of codes and scales eight times 64 codes, and scales; of those of nibbles four times 128 codes
        assert form["loaded"] == (13 if form["KIND"] == NIBBLE_PAGES.value else 9) * form["N"] // 64
    for form in combining:
        # eight bytes of each piece; and of each tile, one of both sums
        assert form["parts_loaded"] == form["U"] * (form["P"] + 1)


@pytest.mark.matrix
@pytest.mark.parametrize("heads", ["8", pytest.param("5 16", marks=pytest.mark.slow)])
def test_every_form_of_few_heads_keeps_every_limit(heads: str) -> None:
    forms = told_by(COMPILES, "few_heads", *heads.split())

    assert [form for form in forms if form["reasons"]] == []
    assert len(forms) == 4 * len(heads.split())
    for form in forms:
        # two programs on a multiprocessor, whatever the columns
        assert form["occupancy"] == 2
        # 64 keys by 512 columns, and 512 dims by 64 keys: 64 products of a warp for eight heads
        assert form["products"] == 64 * form["BH"] // 8
        # codes are never read byte by byte
        assert form["narrow"] == 0


def is_coded(name: str) -> bool:
    """Whether a form reads V4.1's records."""
    return "KIND=2" in name or "KIND=3" in name


def has_nibbles(name: str) -> bool:
    """Whether a form reads V4's records of 4 bits."""
    return "KIND=4" in name or "KIND=5" in name


@pytest.mark.mutation
@pytest.mark.parametrize("keys", ["*bf16", pytest.param("*u8", marks=pytest.mark.slow)])
def test_fewer_registers_for_a_role_are_found(keys: str) -> None:
    """Slow for keys on pages, as the same check finds it."""
    done = run_compiling(COMPILES, "planted", keys)
    assert done.returncode == 0, done.stderr
    # where kernels were not in Triton's cache, this needs `gluon_exit`
    assert "leaked" not in done.stderr

    assert json.loads(done.stdout) == ["SPILLS", "SERIALISED"]


def test_a_block_s_roles_have_what_a_multiprocessor_has() -> None:
    assert V4_PAGES_ROLES.block == ((4, 160), (4, 224), (4, 72), (4, 56))
    assert V41_PAGES_ROLES.block == ((4, 160), (4, 224), (8, 64))
    # twelve warps start with 168 each, of which 8 are unused
    assert BF16_ROWS_ROLES.block == ((4, 216), (4, 216), (4, 72))
    assert RAW_Q_ROLES.block == ((4, 208), (4, 216), (4, 80))
    for roles in (V4_PAGES_ROLES, V41_PAGES_ROLES, BF16_ROWS_ROLES, RAW_Q_ROLES):
        assert FILE - 32 * 4 * 8 <= sum(32 * warps * registers for warps, registers in roles.block) <= FILE


def test_roles_that_take_more_than_there_is_are_found() -> None:
    facts: dict[str, Any] = {
        "registers": 128,
        "spill_stores": 0,
        "spill_loads": 0,
        "stack": 0,
        "shared": 0,
        "threads": 512,
    }
    for scores, codes in ((160, []), (168, ["REGISTER_FILE"])):
        need = Resources(**facts, occupancy=1, wave=32, roles=((4, scores), (4, 224), (8, 64)))

        assert [reason.code for reason in need.reasons(TARGETS["sm_90"])] == codes


def test_the_command_says_why_it_compiles_for_nobody_else() -> None:
    done = run_compiling("-m", "dsv4attn", "compile", "--target", "sm_120", "--backend", "sm90")

    assert done.returncode == 2
    assert "--target: expected a device of sm90: cpu, sm_90, got sm_120" in " ".join(done.stderr.split())
