from __future__ import annotations

import pytest

from dsv4attn.testing import suite


class Acme(suite.Fixtures):
    @pytest.fixture
    def backend(self) -> str:
        return "acme"


class TestDecode(Acme, suite.TestDecode): ...


class TestPrefill(Acme, suite.TestPrefill): ...


class TestCache(Acme, suite.TestCache): ...


class TestMemory(Acme, suite.TestMemory): ...


class TestLayer(Acme, suite.TestLayer): ...
