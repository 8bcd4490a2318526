"""The three layer types against transformers, through the kernels of every Triton backend: the bounds of `test_hf`.

Interpreted, a token takes milliseconds in each of its steps, so one seed and few ways to cut the sequences.
"""

from __future__ import annotations

import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend, Rank
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.selection import load_backend
from tests.backends.built_in import infos, launching_alike
from tests.parity.hf import deviation
from tests.parity.serving import Mode
from tests.parity.test_hf import (
    MODE,
    PLANTED,
    ROUNDED,
    TOLERANCE,
    every_kind,
    geometry,
    judged,
    modes,
    parity,
    served,
    traces,
)

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="sequences are served on the CPU, where kernels are interpreted"
)
TWINS = launching_alike(geometry())
"""Backends that launch, in these dims and on a CPU, the generic backend's kernels and no others."""
BACKENDS = [
    pytest.param(name, marks=pytest.mark.slow if name in TWINS else ())
    for name, info in infos().items()
    if info.rank is not Rank.REFERENCE
]
SEED = 0


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param)


# "single" is one sequence of "mixed"
@pytest.mark.pairwise
@modes("mixed", "verify")
@every_kind
def test_fp32_rows_agree_through_kernels(kind: LayerKind, mode: Mode, backend: Backend) -> None:
    measured = parity(traces(SEED, kind, mode), mode, backend=backend)

    print(f"{kind.value} {mode.name}: {measured:.1e}")
    assert measured <= TOLERANCE


@pytest.mark.matrix
@pytest.mark.pairwise
@every_kind
@pytest.mark.parametrize("layout", ROUNDED.values(), ids=ROUNDED)
def test_rounded_rows_agree_through_kernels(layout: KVCacheLayout, kind: LayerKind, backend: Backend) -> None:
    mode = MODE["chunked"]
    seen = traces(SEED, kind, mode)

    for trace, got in zip(seen, served(seen, mode, layout, backend=backend), strict=True):
        true, bound, exact = judged(trace, layout)
        print(f"off {deviation(got, true):.1e}; exact {deviation(got, exact):.1e}")
        assert ((got - true).abs() <= bound + TOLERANCE * true.abs().max()).all()
        assert deviation(got, exact) <= TOLERANCE


@pytest.mark.in_turn
@every_kind
def test_another_layers_sinks_are_seen_through_kernels(
    kind: LayerKind, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail here too."""
    mode = MODE["single"]
    seen = traces(SEED, kind, mode)
    sinks = seen[0].attention.sinks
    monkeypatch.setattr(sinks, "data", sinks.data.flip(0))

    assert parity(seen, mode, backend=backend) > PLANTED
