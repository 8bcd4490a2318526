"""Clause D2 on trial: the deterministic reference keeps it, and backends whose bits depend on the batch break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.case import Bench, Wrong, chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.cases.whole_layer import v4_layers
from dsv4attn.testing.checks.whole_layer import OTHER_REQUEST, Network, drawn_ways, replayed
from tests.testing import mutants_batch as wrong
from tests.testing.verdicts import all_fail, certificate_of, none_fail

# a mutant, and the cases of which each must fail.
MUTANTS: dict[str, tuple[Callable[[], Any], str]] = {
    "order of a product by the number of rows": (
        wrong.ProductByRows,
        "any-cut-layer-swa,any-cut-layer-c128a,any-cut-layer-fp32,any-cut-layer-ranks",
    ),
    "order of splits by the number of rows": (
        lambda: wrong.exact(wrong.combined_by_rows),
        "any-cut-layer-fp32",
    ),
    "one scale for all rows": (
        wrong.ScaleOfTheBatch,
        "any-cut-layer-swa,any-cut-layer-c4a,any-cut-layer-fp32,any-cut-layer-v41",
    ),
    "keys in the order of pages": (
        lambda: wrong.exact(wrong.in_order_of_pages),
        "any-cut-layer-fp32",
    ),
    "order of the mixes of streams by the number of rows": (
        wrong.with_op("mhc_pre", wrong.mixes_from_the_other_end),
        "any-cut-layer-fp32",
    ),
    "NaN, which equals itself": (
        wrong.with_op("mhc_post", wrong.streams_of_nan),
        "any-cut-layer-swa,any-cut-layer-v41",
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS)
def test_g24_a_backend_whose_bits_depend_on_the_batch_fails(mutant: str) -> None:
    certificate = all_fail(*MUTANTS[mutant])

    assert [o.trace for o in certificate.outcomes if o.trace] == [], "a wrong answer, not an exception"


@pytest.mark.matrix
def test_g24_the_deterministic_reference_keeps_the_clause() -> None:
    none_fail(wrong.exact, "D2")


def test_a_backend_that_is_not_deterministic_is_not_judged() -> None:
    outcomes = certificate_of(ReferenceBackend, "any-cut-*").outcomes

    assert {o.state for o in outcomes} == {"skipped"}
    assert {o.message.partition(":")[0] for o in outcomes} == {"does not apply"}


def test_random_ways_have_each_token_once_with_padding_and_other_requests() -> None:
    counts = (10, 7, 4)
    ways = drawn_ways(counts, 0)

    for way in ways:
        done = [sum(count for step in way.steps for number, count in step if number == i) for i in range(3)]
        assert tuple(done) == counts
        assert len(way.padding) == len(way.steps)
    random = ways[2:]
    assert len(random) == 2
    assert all(any(way.padding) for way in random)
    assert any(number == OTHER_REQUEST for way in random for step in way.steps for number, _ in step)
    assert random != drawn_ways(counts, 1)[2:]


def test_layers_that_demand_a_single_phase_have_it() -> None:
    backend = PhasedBackend(wrong.exact(), wrong.exact())

    network = Network.of(Bench(backend), v4_layers(LayerKind.SWA))

    assert network.managers[0].limits.single_phase


# graphs, without a device


def run_again(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What a captured graph does, by running everything again."""
    out = run().clone()

    def replay() -> None:
        out.copy_(run())

    return replay, out


def run_once(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A graph that has captured nothing."""
    return lambda: None, run()


def in_graph(name: str, capture: Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]) -> None:
    """Run a case of graphs on the CPU."""
    (case,) = chosen(CASES, name)
    with mock.patch("dsv4attn.core.layer.indexer.is_capturing", return_value=True):
        replayed(Bench(wrong.exact()), case.inputs, capture)


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["v4", "v41"])
def test_a_step_in_buffers_that_is_run_again_has_the_bits_of_other_steps(model: str) -> None:
    in_graph(f"any-cut-layer-graph-{model}", run_again)


@pytest.mark.mutation
def test_a_graph_that_captured_nothing_is_found() -> None:
    with pytest.raises(Wrong, match="replays of a graph: 12 of 12 tokens have other bits"):
        in_graph("any-cut-layer-graph-v4", run_once)
