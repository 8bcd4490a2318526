"""The conformance kit as pytest classes, to subclass in a backend's own tests.

A backend's whole test file:

    import pytest
    from dsv4attn.testing import suite

    class Acme(suite.Fixtures):
        @pytest.fixture
        def backend(self):
            return "acme"

    class TestDecode(Acme, suite.TestDecode): ...
    class TestPrefill(Acme, suite.TestPrefill): ...
    class TestCache(Acme, suite.TestCache): ...
    class TestMemory(Acme, suite.TestMemory): ...
    class TestLayer(Acme, suite.TestLayer): ...

Import the module, not its classes, or pytest collects them a second time. Without any file of its own a backend is
run by `pytest -p dsv4attn.testing.plugin --dsv4-backend acme --pyargs dsv4attn.testing.suite`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import ClassVar

import pytest
import torch

from dsv4attn.core.contract.backend import Backend
from dsv4attn.testing.case import Area, Case, dtype_name
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, run_case

__all__ = ["Fixtures", "TestCache", "TestDecode", "TestLayer", "TestMemory", "TestPrefill"]


class Fixtures:
    """Settings of a backend, as the first base class of its five test classes.

    dtypes: types of q to test.
    skip_layouts: fingerprints of layouts, or parts of them ("e4m3fnuz", "interleaved"), to leave out. A layout that the
    backend's `support` refuses is skipped without this, with the reason.
    extra_cases: the backend's own cases.
    """

    # may be overridden

    dtypes: ClassVar[Collection[torch.dtype]] = (torch.bfloat16, torch.float32)
    skip_layouts: ClassVar[Collection[str]] = ()
    extra_cases: ClassVar[Sequence[Case]] = ()

    @pytest.fixture
    def device(self, request: pytest.FixtureRequest) -> str | None:
        """Torch device to run on. Default: the first accelerator, if the backend runs there, or the CPU."""
        chosen: str | None = request.config.getoption("dsv4_device", None)
        return chosen

    # must be overridden

    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest) -> Backend | str:
        """Name of a registered backend, `NAME,option=value`, or a backend object."""
        name: str | None = request.config.getoption("dsv4_backend", None)
        if name is None:
            raise NotImplementedError("override the fixture `backend` to return your backend or its name")
        return name

    @pytest.fixture
    def subject(self, backend: Backend | str, device: str | None) -> Subject:
        """The backend with its device, options and support."""
        if isinstance(backend, str):
            return _named(backend, device)
        return Subject.of(backend, device=device)


@cache
def _named(backend: str, device: str | None) -> Subject:
    """The subject of a name and a device, cached for all tests."""
    return Subject.of(backend, device=device)


class _Suite(Fixtures):
    """The cases of one area."""

    area: ClassVar[Area]

    @classmethod
    def cases(cls) -> list[Case]:
        """Cases of this class, in their order."""
        return [case for case in (*CASES, *cls.extra_cases) if case.area is cls.area and not cls._left_out(case)]

    @classmethod
    def _left_out(cls, case: Case) -> bool:
        named = [layout.fingerprint for layout in case.inputs.named_layouts()]
        if any(part in fingerprint for part in cls.skip_layouts for fingerprint in named):
            return True
        names = {dtype_name(dtype) for dtype in cls.dtypes}
        return any(problem.q_dtype not in names for problem in case.inputs.problems())

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case, named by its clauses and its name."""
        if "case" in metafunc.fixturenames:
            cases = type(self).cases()
            metafunc.parametrize("case", cases, ids=[case.id for case in cases])

    def test_case(self, subject: Subject, case: Case) -> None:
        """The backend keeps the clauses of the case; skipped, with the reasons, if its support refuses."""
        outcome = run_case(subject, case)
        if outcome.state in ("refused", "skipped"):
            pytest.skip(outcome.message)
        said = f"{case.says}\n  clauses {', '.join(case.clauses)} of the contract: {outcome.message}"
        if outcome.state == "failed":
            pytest.fail(f"{said}\n{outcome.trace}".rstrip(), pytrace=False)

    def test_some_case_is_taken(self, subject: Subject) -> None:
        """A backend that refuses every case of the area fails."""
        problems = [case.inputs.problems(lse=case.needs_lse) for case in type(self).cases()]
        if all(subject.refusals(case_problems) for case_problems in problems):
            reasons = subject.refusals(problems[0]) if problems else ["no case is left"]
            pytest.fail(f"no case of {self.area.value} is executed: {'; '.join(reasons)}", pytrace=False)


class TestDecode(_Suite):
    """Attention of few rows, straight on pages."""

    area = Area.DECODE


class TestPrefill(_Suite):
    """Attention of many rows, over the keys the backend asked for."""

    area = Area.PREFILL


class TestCache(_Suite):
    """Records: written, read, gathered; q-norm, rotation, projection."""

    area = Area.CACHE


class TestMemory(_Suite):
    """Workspace and addresses."""

    area = Area.MEMORY


class TestLayer(_Suite):
    """The layer around attention: compressor, indexer, selection, hyper-connections. Torch's steps by default."""

    area = Area.LAYER
