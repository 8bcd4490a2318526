"""The conformance kit on the triton backend: every case, on the accelerator, or in Triton's interpreter on the CPU.

Interpreted, writing a key costs ten thousand times what it costs on a device, and most of the kit's time would go into
the thousands of keys that were there before a step. They are written by the reference, which leaves the same bytes: the
cases of the cache area and `test_insert` show that. What a step itself writes, reads and computes is always Triton's.

Cases that show again what others have shown are slow ones there: `PATIENT`. `-m slow` runs them, and all others once
more with every key written by the backend itself.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatch
from typing import Any

import pytest

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.contract.backend import Backend
from dsv4attn.testing import suite
from dsv4attn.testing.case import Area, Case, chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.backends._triton.triton_backends import QuickHistory


class Quick(QuickHistory, GenericBackend): ...


ALIKE = (
    "topk",
    "pages",
    "pair",
    "moved",
    "layout",
    "indexer",
    "magnitudes",
    "poison",
    "sink-matters",
    "shards",
    "heads",
    "apart-step",
    "apart-c128a",
)
PATIENT = {
    "codes-*": "some seconds each; `test_decode_codes` tries every code under every scale",
    **dict.fromkeys(
        ("million-*", "requests-*", "*-1031", "gather-long", "keys-*"),
        "more than a thousand programs, or keys, one after another",
    ),
    **dict.fromkeys(
        ("layers-swa", "layers-c128a", "layers-mixed"),
        "three layers of history; `layers-c4a` shares all that layers share",
    ),
    "layer-entries": "the layer records and takes entries, whatever runs its kernels; the reference's kit shows it",
    "temporaries-*": "kernels hold as much wherever they run; a device shows it, and the reference the rule",
    **dict.fromkeys(
        (
            "select-1024",
            "select-fnuz",
            "select-bf16",
            "select-fp32",
            "select-nan-mxfp4",
            "select-unused-*",
            "select-gaps",
        ),
        "`test_select_topk` selects among every kind of score, and `test_index_logits` reads every kind of record",
    ),
    **dict.fromkeys(
        ("select-requests", "scores-fnuz", "scores-bf16", "cuts-*", "replay-*", "mhc-sinkhorn-*", "mhc-norm-*"),
        "tests of the kernels show it too, with smaller tiles",
    ),
    "nan-*-prefill": "one kernel serves both phases; only the number of rows differs",
    "nan-interleaved-*": "where scales stand changes no code",
    "nan-ocp-decode": "`nan-fnuz-decode` goes the same way; `test_decode_codes` tries the NaN codes of both dialects",
    **{
        f"{name}-{kind}": "memory is used as on c4a layers, which have more of it"
        for name in ("capped", "plan", "stale")
        for kind in ("c128a", "swa")
    },
    **{f"{name}-*-prefill": "one kernel serves both phases; only the number of rows differs" for name in ALIKE},
}
"""Names of cases that are slow where kernels are interpreted, and why they can wait."""


def waits(case: Case) -> bool:
    """Whether a case is slow here."""
    return INTERPRETED and any(fnmatch(case.name, pattern) for pattern in PATIENT)


def mark_of(case: Case, default: Collection[Case]) -> Any:
    """Of the cases that do not wait, the default run takes the first of each area and set of clauses: `default`."""
    if waits(case):
        return pytest.mark.slow
    return () if case in default or not INTERPRETED else pytest.mark.matrix


class TritonFixtures(suite.Fixtures):
    @pytest.fixture
    def backend(self) -> Backend | str:
        return Quick() if INTERPRETED else "triton"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            cases = metafunc.cls.cases()
            default = {(c.area, c.clauses): c for c in reversed(cases) if not waits(c)}.values()
            params = [pytest.param(c, id=c.id, marks=mark_of(c, default)) for c in cases]
            metafunc.parametrize("case", params)


class TestDecode(TritonFixtures, suite.TestDecode): ...


class TestPrefill(TritonFixtures, suite.TestPrefill): ...


class TestMemory(TritonFixtures, suite.TestMemory): ...


class TestLayer(TritonFixtures, suite.TestLayer): ...


class TestCache(TritonFixtures, suite.TestCache):
    @pytest.fixture
    def backend(self) -> Backend | str:
        return "triton"


# options: what they change is how attention is cut, so a sample of it

SAMPLE = (
    "decode-c4a,mixed-swa,verify-c128a,call-holes-c4a-decode,call-empty-c4a-decode,sink-values-decode,"
    "dtype-float32-fp32-decode,dtype-float32-ocp-decode,dims-c4a-prefill,pair-ocp-fnuz-decode,scratch-*"
)


@pytest.mark.matrix
@pytest.mark.skipif(not INTERPRETED, reason="on a device options are those of `dsv4attn conform`")
@pytest.mark.parametrize(
    "options",
    [{"tuning": "sm_90"}, {"tuning": "default", "deterministic": True}],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_the_options_keep_the_contract_too(options: dict[str, object]) -> None:
    backend = (Quick if INTERPRETED else GenericBackend)(**options)  # type: ignore[arg-type]

    certificate = conform(Subject.of(backend), chosen(CASES, SAMPLE))

    assert certificate.ok, "\n".join(f"{outcome.case.id}: {outcome.message}" for outcome in certificate.of("failed"))
    assert len(certificate.of("passed")) == len(certificate.outcomes)


# and once more as it is


@pytest.mark.slow
@pytest.mark.parametrize("area", [Area.DECODE, Area.PREFILL, Area.MEMORY], ids=lambda area: area.value)
def test_the_kit_passes_with_every_key_written_by_the_backend_itself(area: Area) -> None:
    certificate = conform(Subject.of("triton"), [case for case in CASES if case.area is area])

    assert certificate.ok, "\n".join(f"{outcome.case.id}: {outcome.message}" for outcome in certificate.of("failed"))
