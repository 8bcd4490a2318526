"""What descriptors say of V4.1's steps is what their backends bring."""

from __future__ import annotations

import pytest
from attrs import evolve

from dsv4attn import load_backend
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.op_names import CANDIDATES, DELAYED, LATENTS
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.selection import explain, registered
from tests.backends.built_in import triton_backends

PARTS = {"compressor": LATENTS, "candidates": CANDIDATES, "hyper_connections": DELAYED}
HERE = DeviceFacts.here("cpu")


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("name", triton_backends())
def test_a_descriptor_names_torch_exactly_where_the_backend_has_no_step_of_v41(name: str, ratio: int) -> None:
    problem = Problem.of(ModelGeometry.preset("v4.1-flash"), compress_ratio=ratio)
    steps_text, sources = (
        explain(problem, backend=name, device=HERE).layer_parts,
        load_backend(name).layer_ops.v41_sources(name),
    )

    for part, steps in PARTS.items():
        is_own = {sources[step] for step in steps} == {name}
        assert steps_text[part].partition(" (")[0] == (name if is_own else "reference"), part
    assert (steps_text["indexer"], steps_text["selection"]) == (name, name)


@pytest.mark.parametrize("ratio", [1, 2])
def test_layers_of_v41_whose_queries_have_a_norm_have_the_same_parts(ratio: int) -> None:
    model = ModelGeometry.preset("v4.1-flash")
    actual, expected = (
        explain(Problem.of(geometry, compress_ratio=ratio), backend="triton", device=HERE).layer_parts
        for geometry in (evolve(model, q_norm=True), model)
    )

    assert "candidates" in actual
    assert actual == expected


@pytest.mark.parametrize("name", triton_backends())
def test_v4_layers_have_no_candidates_and_the_steps_are_the_backends(name: str) -> None:
    problem = Problem.of(ModelGeometry.preset("flash"))
    assert explain(problem, backend=name, device=HERE).layer_parts == dict.fromkeys(
        registered(name).info.layer_ops, name
    )
