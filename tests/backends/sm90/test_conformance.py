"""The conformance kit on the Hopper backend: all of it on an H200, a few cases on its interpreted kernels.

Interpreted, the reference writes the keys that were there before a step. Cases that show what the test of the generic
backend has shown of the shared steps are slow ones, see `tests/backends/triton/test_conformance.py`. So are page
sizes and head counts of which `test_attention` and `test_schedule` try more. Prefill on gathered rows has few cases, as
its kernel, its schedule and core's gathering are proven elsewhere too; the slow ones have all of them.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, ClassVar

import pytest

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.attention import small_decode
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import COMBINE_ROUNDS
from dsv4attn.core.contract.backend import Backend
from dsv4attn.testing import suite
from dsv4attn.testing.case import Case
from tests.backends._triton.triton_backends import QuickHistory

NOW = (
    "decode-*",
    "mixed-c4a",
    "prefill-c128a",
    "call-holes-c4a-decode",
    "call-empty-c4a-decode",
    "sink-values-decode",
    "lse-*-decode",
    "heads-3-decode",
    "heads-128-decode",
    "pages-1-64-decode",
    "pages-256-256-decode",
    "scratch-*",
    "poison-ocp-decode",
    "apart-call-decode",
    "nan-ocp-decode",
    "call-wide-c4a-decode",
    "block-swa",
    "codes-*-copies-*decode",
)
"""Names of cases that are not slow where kernels are interpreted: what this backend does otherwise than all others."""
NOW_GATHERED = (
    "mixed-c4a",
    "raw-c4a",
    "prefill-swa",
    "pair-ocp-fnuz-prefill",
    "dims-c4a-prefill",
    "call-holes-c4a-prefill",
    "call-empty-c4a-prefill",
    "sink-values-prefill",
    "lse-prefill",
    "lse-empty-prefill",
    "scratch-*",
    "gather-ocp-*",
    "apart-call-prefill",
    "ahead-c4a",
)
"""The same, of prefill on gathered rows: both kernels, a step with decode, and what a call may hold."""
NOW_TILES = (
    "decode-*",
    "indexer-*-decode",
    "layers-c4a",
    "apart-step-decode",
    "padding-decode",
    "call-holes-c4a-decode",
    "call-empty-c4a-decode",
    "sink-values-decode",
    "lse-*-decode",
    "heads-3-decode",
    "pages-1-64-decode",
    "poison-ocp-decode",
    "apart-call-decode",
    "nan-ocp-decode",
    "codes-ocp-decode",
    "codes-v41-copies-few-decode",
    "pair-v41-fp4-split-decode",
)
"""The same, of decodes by programs of one tile, whose parts have powers of two of their own."""


class Quick(QuickHistory, Sm90Backend): ...


class Sm90Fixtures(suite.Fixtures):
    # also where the shared kernel, whose own backend shows all of it, is faster
    options: ClassVar[dict[str, Any]] = {"small": "gluon"}
    now: ClassVar[tuple[str, ...]] = NOW

    @pytest.fixture
    def backend(self) -> Backend | str:
        return (Quick if INTERPRETED else Sm90Backend)(**self.options)

    @classmethod
    def waits(cls, case: Case) -> bool:
        """Whether a case is slow here."""
        return INTERPRETED and not any(fnmatch(case.name, pattern) for pattern in cls.now)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            fixtures: Any = metafunc.cls
            params = [
                pytest.param(case, id=case.id, marks=pytest.mark.slow if fixtures.waits(case) else ())
                for case in fixtures.cases()
            ]
            metafunc.parametrize("case", params)


class Gathered(Sm90Fixtures):
    options: ClassVar[dict[str, Any]] = {"prefill": "gathered", "small": "gluon"}
    now: ClassVar[tuple[str, ...]] = NOW_GATHERED


class TileSizes(Sm90Fixtures):
    options: ClassVar[dict[str, Any]] = {}
    now: ClassVar[tuple[str, ...]] = NOW_TILES

    @pytest.fixture(autouse=True)
    def units(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many programs as tiles, and few that combine their parts, where they run one after the other."""
        if INTERPRETED:
            monkeypatch.setattr(launch, "multiprocessors", lambda: 60)
            monkeypatch.setattr(small_decode, "combine_rounds_of", lambda *_: COMBINE_ROUNDS[-1])


class TestDecode(Sm90Fixtures, suite.TestDecode): ...


class TestTiles(TileSizes, suite.TestDecode): ...


class TestPrefill(Sm90Fixtures, suite.TestPrefill): ...


class TestMemory(Sm90Fixtures, suite.TestMemory): ...


class TestCache(Sm90Fixtures, suite.TestCache): ...


class TestGatheredPrefill(Gathered, suite.TestPrefill): ...


class TestGatheredMemory(Gathered, suite.TestMemory): ...


class TestGathering(Gathered, suite.TestCache):
    @classmethod
    def cases(cls) -> list[Case]:
        # all others have nothing to do with the form of prefill
        return [case for case in super().cases() if "gather" in case.name]
