"""docs/contract.md and the cases say the same: every clause is proven by a case, every case names clauses."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from dsv4attn.testing.case import Area
from dsv4attn.testing.cases.table import CASES, GROUPS
from dsv4attn.testing.kit import factories

DOC = (Path(__file__).resolve().parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
CLAUSES = dict(re.findall(r"^- \*\*([A-Z]\d+)\.\*\* (.*?)(?=^- |^$)", DOC, flags=re.MULTILINE | re.DOTALL))


def test_the_document_was_read() -> None:
    assert len(CLAUSES) > 40
    assert [*dict.fromkeys(clause[0] for clause in CLAUSES)] == [*GROUPS]
    assert list(re.findall(r"^## ([A-Z])\. ", DOC, flags=re.MULTILINE)) == [*GROUPS]


def test_clauses_of_a_letter_are_numbered_without_gaps() -> None:
    for letter in GROUPS:
        numbers = [int(clause[1:]) for clause in CLAUSES if clause[0] == letter]

        assert numbers == [*range(1, len(numbers) + 1)], letter


def test_a_clause_names_exactly_the_cases_that_prove_it() -> None:
    for clause, text in CLAUSES.items():
        says, _, proof = text.replace("\n  ", " ").rpartition("Proven by ")
        patterns = re.findall(r"`([^`]+)`", proof)
        proven = {case.name for case in CASES if clause in case.clauses}

        assert says.count(". ") <= 3, f"{clause}: a clause is a sentence or two"
        assert proven, f"some case proves {clause}"
        assert {p for p in patterns if not any(fnmatchcase(name, p) for name in proven)} == set(), clause
        assert {case.name for case in CASES for p in patterns if fnmatchcase(case.name, p)} == proven, clause


def test_a_case_names_clauses_that_exist_and_says_a_sentence() -> None:
    for case in CASES:
        assert case.clauses, case.name
        assert set(case.clauses) <= set(CLAUSES), case.name
        assert len(set(case.clauses)) == len(case.clauses), case.name
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case.name)
        assert len(case.name) <= 30, f"{case.name} fits a table"
        assert case.says, case.name
        assert not case.says.endswith("."), case.name
        assert case.inputs.device == "cpu", case.name
        assert case.inputs.problems(), case.name
        assert case.inputs.named_layouts(), case.name


def test_every_area_and_most_dims_a_real_kernel_has() -> None:
    assert {case.area for case in CASES} == set(Area)
    real = [c for c in CASES if all(p.layer.head_dim == 512 and p.layer.window == 128 for p in c.inputs.problems())]
    assert {case.name for case in CASES if case not in real} == {c.name for c in CASES if c.name.startswith("dims-")}


def test_cases_cover_what_models_and_engines_bring() -> None:
    problems = [problem for case in CASES for problem in case.inputs.problems()]

    assert {1, 3, 4, 8, 16, 32, 64, 80, 128} <= {p.layer.num_heads for p in problems}
    assert {0, 1, 3, 63, 64, 65, 128, 512, 1024} <= {p.topk for p in problems}
    assert {1, 2, 16, 32, 64, 128, 256, 512} <= {p.swa.page_size for p in problems}
    assert {1, 2, 16, 32, 64, 128, 256, 512} <= {p.compressed.page_size for p in problems if p.compressed}
    assert {1, 4} <= {p.query_len for p in problems}
    assert {p.swa.dtype for p in problems} == {"e4m3fn", "e4m3fnuz", "e2m1", "bfloat16", "float32"}
    assert {p.sink for p in problems} == {True, False}
    assert {p.q_dtype for p in problems} == {"bfloat16", "float32"}
    assert {(p.phase, p.layer.kind.value) for p in problems} == {
        (phase, kind) for phase in ("decode", "prefill") for kind in ("swa", "c4a", "c128a")
    }


def test_counts_of_the_presets_under_tensor_parallel_are_those_that_the_released_models_have() -> None:
    assert factories.HEAD_COUNTS == (8, 16, 32, 64, 128)
    assert factories.GROUP_COUNTS == (1, 2, 4, 8, 16)
    assert factories.INDEX_TOPKS == (512, 1024)
    assert factories.INDEX_HEAD_COUNTS == (32, 64)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_attention_has_a_case_for_every_count_of_every_preset(phase: str) -> None:
    names = {case.name for case in CASES}

    assert {f"heads-{heads}-{phase}" for heads in factories.HEAD_COUNTS} <= names
    assert {f"topk-{topk}-{phase}" for topk in factories.INDEX_TOPKS} <= names
    assert {f"pages-{page}-{page}-{phase}" for page in factories.PAGE_SIZES} <= names
