"""DSV4ATTN_REFERENCE_OPS sends ops to the reference: it finds a planted bug, and every report says that it is set."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import fields
from torch import Tensor

from dsv4attn import SingleLayer
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.config import Settings, load_settings
from dsv4attn.core.contract import BuilderOps, IndexOps, LayerOps, RankOps
from dsv4attn.core.contract.info import COMPUTING
from dsv4attn.core.contract.op_names import GROUPS, LAYER_OPS, expanded, known_names, lacking
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, ConfigError, Dsv4AttnError, NoBackendError
from dsv4attn.selection import explain, load_backend, reference_ops, select_backend
from dsv4attn.selection.reference_ops import ReferenceOpsBackend, reference_ops_of
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.certificates import table_of_certificates
from dsv4attn.testing.conform import Subject, conform
from dsv4attn.tools.bench.result import Machine, Run, load
from dsv4attn.tools.bench.roofline import Roofline
from tests.backends.built_in import triton_backends
from tests.harness import SMALL, LayerStack
from tests.harness_v41 import SMALL_V41
from tests.selection.planted_ops import BUGS, install_planted
from tests.vendor_wheel import VendorWheels

VARIABLE = "DSV4ATTN_REFERENCE_OPS"
FLASH = ModelGeometry.preset("flash")
SetOps = Callable[[str], None]


@pytest.fixture
def set_ops(monkeypatch: pytest.MonkeyPatch, wheels: VendorWheels) -> SetOps:
    """Set the variable, on a machine that has the backend `acme`."""
    install_planted(wheels)

    def set_variable(ops: str) -> None:
        monkeypatch.setenv(VARIABLE, ops)

    return set_variable


def outputs(backend: str, bug: str = "") -> list[Tensor]:
    """A prompt, a decode, and a step of both, on one layer that selects entries."""
    made = load_backend(backend, **({"bug": bug} if bug else {}))
    layer = SingleLayer(SMALL, "c4a", device="cpu", backend=made, max_requests=2, max_tokens=32, max_model_len=64)
    generator = torch.Generator("cpu").manual_seed(3)
    first, second = layer.new_request(), layer.new_request()
    steps = [[(first, 31)], [(first, 1)], [(first, 1), (second, 24)]]
    results = []
    for step in steps:
        results += layer.step(
            *[(r, torch.randn(n, layer.hidden_size, generator=generator).to(layer.dtype)) for r, n in step]
        )
    return results


def is_right(bug: str, expected: list[Tensor]) -> bool:
    return all(map(torch.equal, outputs("acme", bug), expected))


# the names


def test_every_op_of_every_table_has_a_name_and_every_name_an_op() -> None:
    tables = LayerOps, IndexOps, BuilderOps, RankOps
    no_ops = {"transient_bytes", "sum_bits", "most_over_ranks", "merge_scratch", "coded"}
    ops = {each.name for table in tables for each in fields(table)} - no_ops | COMPUTING | {"prepare_rows"}

    assert {op for group in GROUPS.values() for op in group} == ops
    assert len(expanded(["all"])) == len(ops)
    assert len({*known_names()}) == len(ops) + len(GROUPS) + 1
    assert expanded(["select_topk", "attend", "select_topk"]) == ("decode", "prefill", "select_topk")
    assert all({*LAYER_OPS[part]} <= {*GROUPS[part]} for part in LAYER_OPS)


def test_an_unknown_name_is_an_error_that_names_the_known_ones(set_ops: SetOps) -> None:
    set_ops("attend,select_topp")
    with pytest.raises(ConfigError, match=rf"^environment variable {VARIABLE}: unknown op 'select_topp'; did you mean"):
        load_settings()
    with pytest.raises(ConfigError, match=r"groups: all, attend, .*ops: decode, prefill, .*select_topk"):
        load_backend("acme")
    with pytest.raises(ArgumentError, match=r"Settings\.reference_ops: .*unknown op 'attnd'; did you mean 'attend'"):
        Settings(reference_ops=("attnd",))


@pytest.mark.parametrize("kind", [kind.value for kind in FLASH.kinds])
def test_an_op_that_no_layer_has_is_an_error_before_a_backend_is_built(set_ops: SetOps, kind: str) -> None:
    set_ops("select_topk")
    problems = [Problem.of(FLASH, kind, phase) for phase in ("decode", "prefill")]
    every = [Problem.of(FLASH, each, phase) for each in FLASH.kinds for phase in ("decode", "prefill")]
    if kind == "c4a":
        assert reference_ops_of(select_backend(*problems, backend="acme")) == ("select_topk",)
    else:
        with pytest.raises(ConfigError, match=rf"{VARIABLE}: no layer of these kinds has select_topk: {kind}"):
            select_backend(*problems, backend="acme")
    assert reference_ops_of(select_backend(*every, backend="acme")) == ("select_topk",)
    set_ops("select_candidates,attend")
    with pytest.raises(ConfigError, match=r"has select_candidates: .* -> take it out, or choose"):
        select_backend(*every, backend="acme")


def test_layers_lack_the_ops_of_other_kinds_and_versions() -> None:
    v41 = ModelGeometry.preset("deepseek-v4.1-flash")
    swa, c4a, c128a = (FLASH.layer_of_kind(kind) for kind in ("swa", "c4a", "c128a"))
    of_v41 = v41.layer_of_kind("c4a", 2)
    names = ["attend", "compressor", "save_partial_states", "select_topk", "compress_latents", "mhc_pre", "all"]

    assert lacking(names, [swa]) == ["compressor", "save_partial_states", "select_topk", "compress_latents"]
    assert lacking(names, [c128a]) == ["select_topk", "compress_latents"]
    assert lacking(names, [swa, c4a]) == ["compress_latents"]
    assert lacking(names, [of_v41]) == ["save_partial_states"]


# bisection


@pytest.mark.matrix
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.mutation] * (i > 1)) for i, bug in enumerate(BUGS)]
)
def test_a_planted_bug_is_found_by_the_group_and_then_by_the_op(set_ops: SetOps, bug: str) -> None:
    expected = outputs("reference")
    assert not is_right(bug, expected)
    set_ops("all")
    assert is_right(bug, expected)
    right_groups = []
    for group in GROUPS:
        set_ops(group)
        if is_right(bug, expected):
            right_groups.append(group)
    assert right_groups == [group for group, ops in GROUPS.items() if bug in ops]
    right_ops = []
    for op in GROUPS[right_groups[0]]:
        set_ops(op)
        if is_right(bug, expected):
            right_ops.append(op)
    assert right_ops == [bug]


def test_without_the_variable_a_backend_is_what_its_factory_made(set_ops: SetOps) -> None:
    assert type(load_backend("acme")).__name__ == "PlantedBackend"
    set_ops("")
    assert type(load_backend("acme")).__name__ == "PlantedBackend"


def test_the_reference_itself_is_not_changed(set_ops: SetOps) -> None:
    set_ops("all")
    assert type(load_backend("reference")).__name__ == "ReferenceBackend"


@pytest.mark.parametrize("name", triton_backends())
def test_all_ops_of_a_kernel_backend_can_be_the_references(set_ops: SetOps, name: str) -> None:
    """Forms, scratch and strategies stay those of the backend: only the functions are others."""
    set_ops("all")
    backend = load_backend(name)
    assert isinstance(backend, ReferenceOpsBackend)
    assert backend.capabilities == backend.wrapped.capabilities
    assert {*backend.layer_ops.sources(name).values()} == {"reference"}
    for result, expected in zip(outputs(name), outputs("reference"), strict=True):
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_all_ops_of_v41_can_be_the_references(set_ops: SetOps) -> None:
    """Latents, candidates and index keys of DeepSeek-V4.1, at both ratios."""

    def output(backend: str, ratio: int) -> Tensor:
        sizes = {"max_requests": 1, "max_tokens": 64, "max_model_len": 64}
        made = load_backend(backend)
        layer = SingleLayer(SMALL_V41, "c4a", compress_ratio=ratio, device="cpu", backend=made, **sizes)  # type: ignore[arg-type]
        hidden = torch.randn(33, layer.hidden_size, generator=torch.Generator("cpu").manual_seed(1))
        return layer.step((layer.new_request(), hidden.to(layer.dtype)))[0]

    expected = [output("reference", ratio) for ratio in (1, 2)]
    set_ops("all")
    for name in triton_backends()[:1]:
        for ratio, right in zip((1, 2), expected, strict=True):
            torch.testing.assert_close(output(name, ratio), right, rtol=2e-2, atol=2e-2)


def test_copies_have_the_same_ops() -> None:
    backend = ReferenceOpsBackend(ReferenceBackend(), ReferenceBackend(), ["attend", "projection"])

    for copied in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):  # noqa: S301 - of this test
        assert reference_ops_of(copied) == ("attend", "projection")
        assert repr(copied).endswith("by the reference: attend projection>")
        # a method that only the other class has
        assert copied.reference.name == "reference"
        assert copied._raw_q is False
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = backend.nothing_of_this_name


def test_one_phase_of_the_reference_does_not_agree_with_the_other_phase() -> None:
    """A deterministic layer then asks for a single phase, as with two backends."""
    kernels, reference = load_backend("triton", deterministic=True), ReferenceBackend(deterministic=True)
    agree = {
        names: ReferenceOpsBackend(kernels, reference, names).phases_agree
        for names in (("decode",), ("prefill",), ("attend",), ("select_topk",))
    }
    assert agree == {("decode",): False, ("prefill",): False, ("attend",): True, ("select_topk",): True}
    mixed = ReferenceOpsBackend(kernels, reference, ["decode"])
    assert not copy.deepcopy(mixed).phases_agree
    with pytest.raises(ArgumentError, match=r"^limits: expected Limits\(\.\.\., single_phase=True\)"):
        LayerStack(mixed)


def test_two_phases_have_the_ops_of_both(set_ops: SetOps) -> None:
    set_ops("attend")
    problems = [Problem.of(FLASH, "c4a", phase) for phase in ("decode", "prefill")]
    pair = select_backend(*problems, backend="decode=acme,prefill=reference")

    assert isinstance(pair, PhasedBackend)
    assert reference_ops_of(pair) == ("attend",)


# capture


def test_a_captured_op_of_the_reference_is_an_error(set_ops: SetOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_ops, "is_capturing", lambda _: True)
    for ops, op in (
        ("attend", "prefill"),
        ("select_topk", "select_topk"),
        ("index_ops", "combine_topk_swa_indices"),
        ("insert", "qnorm_rope_kv_insert"),
    ):
        set_ops(ops)
        with pytest.raises(Dsv4AttnError, match=rf"^{op} is captured in a graph, and {VARIABLE} sends it to the refer"):
            outputs("acme")


def test_a_captured_problem_is_refused(set_ops: SetOps) -> None:
    set_ops("attend")
    problem = Problem.of(FLASH, "c4a", "decode", capture=True)
    selection = explain(problem, backend="acme")

    assert selection.chosen is None
    assert "ops of the reference in backend 'acme' contradict the problem" in str(selection)
    assert "CAPTURE  a captured graph, with DSV4ATTN_REFERENCE_OPS=attend, needs eager calls" in str(selection)
    with pytest.raises(NoBackendError, match="take DSV4ATTN_REFERENCE_OPS away"):
        select_backend(problem, backend="acme")


# who says so


def test_explain_says_which_ops_are_the_references(set_ops: SetOps) -> None:
    problem = Problem.of(FLASH, "c4a", "decode")
    assert "DSV4ATTN_REFERENCE_OPS" not in str(explain(problem, backend="acme"))
    set_ops("attend,selection")
    selection = explain(problem, backend="acme")

    assert "reference  computes attend, selection  (environment variable DSV4ATTN_REFERENCE_OPS)" in str(selection)
    assert selection.layer_parts["selection"] == "reference"
    assert selection.layer_parts["compressor"] == "acme"
    # all ops of the reference are its own
    assert explain(problem, backend="reference").replaced == ""


def test_a_certificate_says_so_and_is_not_complete(set_ops: SetOps, tmp_path: Path) -> None:
    set_ops("attend,inv_rope_o_proj")
    result = conform(Subject.named("acme", device="cpu"), chosen(CASES, "decode-swa"))
    values = result.as_json()

    assert values["reference_ops"] == ["attend", "inv_rope_o_proj"]
    assert not values["complete"]
    assert values["verdict"].startswith("acme, with attend and inv_rope_o_proj of the reference, proves nothing of its")
    (tmp_path / "certificates").mkdir()
    (tmp_path / "certificates" / "acme.json").write_text(json.dumps(values), encoding="utf-8")
    assert "with attend and inv_rope_o_proj of the reference" in table_of_certificates(tmp_path / "certificates")


def test_a_certificate_without_the_variable_has_no_such_op(set_ops: SetOps) -> None:
    result = conform(Subject.named("acme", device="cpu"), chosen(CASES, "decode-swa"))

    assert result.as_json()["reference_ops"] == []
    assert result.complete


def test_a_saved_benchmark_says_so(tmp_path: Path) -> None:
    machine, roofline = Machine("m", "cpu", "2", None, "3", "0", 1), Roofline(1.0, 1.0, "float32")
    run = Run(machine, "today", 1, roofline, (), reference_ops=("attend",))
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(run.as_json()), encoding="utf-8")

    assert json.loads(path.read_text(encoding="utf-8"))["reference_ops"] == ["attend"]
    assert load(path, "--from").reference_ops == ("attend",)


def test_the_page_lists_every_group_with_its_ops() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "debugging.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `") and "DSV4ATTN" not in line]
    listed = {group.strip(" `"): tuple(ops.strip().replace("`", "").split(", ")) for _, group, ops, _ in rows}

    assert {group: ops for group, ops in listed.items() if group != "all"} == dict(GROUPS)
