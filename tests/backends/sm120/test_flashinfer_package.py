"""The real package, where it is installed: its signature, and its own Python over a stand-in for what it compiles.

Only the compiled module is played, by the checks of `recording`; planning, keys of plans, scratch and the path of every
argument are the package's. Skipped, with the reason, where FlashInfer cannot be imported.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.sm120.flashinfer import FlashInferAttention
from dsv4attn.backends.sm120.probe import InstalledFlashInfer, find
from dsv4attn.backends.sm120.served import reasons
from dsv4attn.core.contract.problem import Problem, Reason
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import UnsupportedError
from dsv4attn.testing.kit.tolerances import tolerance
from tests.backends.sm120.decode_calls import LAYOUT, Trial, installed_flashinfer
from tests.backends.sm120.fake_flashinfer import HEADS, Facts, FormatsWrapper, RecordingWrapper, Segment, inspected
from tests.backends.sm120.test_formats import trial_of

BUDGET = tolerance(LAYOUT, torch.bfloat16) + 2**-9
SHARED = 101376
"""Bytes of shared memory that a block may have on such a card."""


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="its stand-in takes the CPU's tensors, and kernels do not")


@pytest.fixture(scope="module")
def package() -> InstalledFlashInfer:
    answer = find()
    if isinstance(answer, Reason):
        pytest.skip(answer.text)
    return answer


class Plan:
    """What the planner would have compiled."""

    def __init__(self, facts: Facts, variant: int) -> None:
        rows = facts.scratch if variant == 0 else 0
        self.facts, self.shapes = facts, [((rows, 512), "bfloat16"), ((rows,), "float32"), (facts[:2], "float32")]

    def workspace(self) -> list[tuple[tuple[int, ...], str, int, int]]:
        """(shape, dtype, bytes, alignment) of parts, their lse and the lse."""
        return [(shape, dtype, prod(shape) * getattr(torch, dtype).itemsize, 16) for shape, dtype in self.shapes]


class Compiled:
    """The functions that the package compiles, for this model's cache.

    ran: variant of each call. fields: names of a call's metadata, in the package's order, which differs by release.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.ran: list[int] = []
        self.fields = fields
        self._facts: dict[tuple[int, ...], Facts] = {}

    def resolve_format(self, dim: int, name: str) -> int:
        assert (dim, name) == (512, "auto")
        return 1

    def format_info(self, model: int) -> dict[str, int]:
        assert model == 1
        return {"query_dim": 512, "value_dim": 512, "bytes_per_token": 584, "page_size": 64, "chunk_width": 64}

    def inspect_metadata(self, *arguments: Any) -> list[int]:
        *tensors, model, extra_fp4, value_dim = arguments
        assert (model, extra_fp4, value_dim) == (1, False, 512)
        facts = inspected(*tensors)
        main, extra = facts.main, facts.extra or Segment(0, 0, 0, 0)
        sizes = [main.width, extra.width, main.page_size, extra.page_size, main.page_stride, extra.page_stride]
        strides = [584, main.index_stride, extra.index_stride, facts.lse_stride]
        has = [tensors[4] is not None, tensors[8] is not None, facts.has_sink, False]
        numbers = [1, facts.tokens, facts.heads, *sizes, *strides, *map(int, has), 0]
        if "extra_row_stride_bytes" in self.fields:
            numbers.append(584 if has[1] else 0)
        self._facts[tuple(numbers)] = facts
        return numbers

    def candidates(self, model: int, heads: int, width: int, page: int, dual: bool, *_: Any) -> list[int]:
        second = Segment(64, 64, 37376, 64) if dual else None
        return self._variants(Facts(1, heads, Segment(width, page, 0, width), second, heads, False))

    def metadata_candidates(self, metadata: tuple[int, ...], *_: Any) -> dict[int, int]:
        return dict.fromkeys(self._variants(self._facts[tuple(metadata)]), 1)

    @staticmethod
    def _variants(facts: Facts) -> list[int]:
        prefill = 2 if facts.extra is None else 3
        return [0 if phase == "decode" else prefill for phase in facts.phases()]

    def resolve_attention(self, metadata: tuple[int, ...], *_: Any) -> Plan:
        at = self.fields.index("variant")
        planned, variant = (*metadata[:at], 0, *metadata[at + 1 :]), metadata[at]
        facts = self._facts[planned]
        assert variant in self._variants(facts)
        self.ran.append(variant)
        return Plan(facts, variant)

    def execute_attention(self, plan: Plan, *arguments: Any) -> None:
        q, cache, indices, mid, mlse, output, lse, scale, lengths, sink, extra, extra_indices, extra_lengths, base = (
            arguments
        )
        again = inspected(q, cache, indices, output, lengths, sink, extra, extra_indices, extra_lengths, lse, mid, mlse)
        assert again == plan.facts, "the tensors are not those that were planned for"
        assert mid.numel() * 2 >= plan.workspace()[0][2]
        RecordingWrapper(device="cpu").run(
            *(q, cache, indices, output, scale),
            topk_length=lengths,
            attn_sink=sink,
            extra_kv_cache=extra,
            extra_indices=extra_indices,
            extra_topk_length=extra_lengths,
            out_lse=lse,
            mid_out=mid,
            mid_lse=mlse,
            lse_scale=base,
        )


@pytest.fixture
def compiled(package: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> Iterator[Compiled]:
    """Put a stand-in where the package would compile, and a card's numbers where it would ask the driver."""
    names = ("_execution", "_policy", "_prepared", "_calibration")
    parts = [importlib.import_module(f"flashinfer.mla._sparse_mla_sm120.{name}") for name in names]
    execution, policy, prepared, calibration = parts
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_DIR", str(tmp_path_factory.mktemp("profiles")))

    def forget() -> None:
        for part in (execution, policy):
            for value in vars(part).values():
                if hasattr(value, "cache_clear") and value.__module__ == part.__name__:
                    value.cache_clear()

    stand_in = Compiled(execution.AttentionMetadata._fields)
    monkeypatch.setattr(execution, "gen_sparse_mla_sm120_module", lambda: Generated(stand_in))
    monkeypatch.setattr(prepared, "device_caps", lambda _: (188, SHARED))
    monkeypatch.setattr(calibration, "_device_key", lambda _: "0:a card")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forget()
    yield stand_in
    forget()


class Generated:
    """What the package makes of its sources."""

    def __init__(self, module: Compiled) -> None:
        self._module = module

    def build_and_load(self) -> Compiled:
        """No compiler is called."""
        return self._module


def test_the_recording_has_the_signature_of_the_real_wrapper(package: Any) -> None:
    real, ours = (inspect.signature(wrapper.run) for wrapper in (package.wrapper, RecordingWrapper))

    assert [str(parameter) for parameter in ours.parameters.values()] == [
        str(parameter) for parameter in real.parameters.values()
    ]
    assert "device" in inspect.signature(package.wrapper).parameters


def test_the_real_package_takes_any_page_and_any_width(package: Any) -> None:
    assert package.heads == {*range(1, 129)}
    assert package.head_counts(65) == set(HEADS)
    assert package.topks is package.page_sizes is None
    assert package.max_decode_tokens == 64


@pytest.mark.parametrize("name", ["fp8_dsv41", "fp8_dsv41_inline", "fp8_dsv41_inline_fp4_ca", "nvfp4"])
def test_the_real_wrapper_takes_the_arguments_of_each_format_and_its_checks_our_pages(name: str, package: Any) -> None:
    found = {other.format.name: other for other in package.others}
    if name not in found:
        pytest.skip(f"flashinfer {package.version} has no {name}")
    cache_format = found[name].format
    found[name].wrapper(device="cpu")
    if cache_format.dense_pages:
        recording = partial(FormatsWrapper, **cache_format.arguments)
        subject = installed_flashinfer(others=(attrs.evolve(found[name], wrapper=recording),))
        trial, attention = trial_of(name), FlashInferAttention(subject)
        trial.run(attention, trial.call())
        (call,) = attention._wrapper(trial.q.device, subject.others[0]).calls
        execution = importlib.import_module("flashinfer.mla._sparse_mla_sm120._execution")
        fp4 = "extra_kv_fp4" in cache_format.arguments
        scales = cache_format.arguments["kv_scale_format"]
        execution.check_inline_scale_caches(scales, call["kv_cache"], call["extra_kv_cache"], fp4)
        with pytest.raises(ValueError, match=r"288-byte|528-byte"):
            execution.check_inline_scale_caches(scales, call["kv_cache"], call["extra_kv_cache"], not fp4)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize("preset", ["flash", "pro"])
def test_the_real_package_serves_the_model(preset: str, kind: LayerKind, phase: str, package: Any) -> None:
    assert reasons(package, Problem.of(ModelGeometry.preset(preset), kind, phase)) == []


@pytest.mark.pairwise
@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("widths", [(6, 0), (6, 9), (64, 0), (128, 64)])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (5, 3), (5, 8), (5, 100), (5, 128), (64, 8), (65, 3), (65, 8)])
def test_its_own_checks_accept_every_call(
    heads: int, tokens: int, widths: tuple[int, int], lse: bool, package: Any, compiled: Compiled
) -> None:
    trial = Trial(heads=heads, tokens=tokens, widths=widths, sinks=(0.5, -1.0))
    subject = FlashInferAttention(package)
    call = trial.run(subject, trial.call(lse=lse, pad=2))

    assert trial.expected.errors(call.out, call.lse).max() <= BUDGET
    # once for out, and before it once for an lse
    assert compiled.ran == [0 if tokens <= 64 else 2 + bool(widths[1])] * (1 + lse)
    (wrapper,) = subject._wrappers.values()
    assert wrapper._scratch_arenas == [None, None], "it made scratch of its own"
    assert all(plan.mid is plan.mlse is plan.lse is None for plan in wrapper._prepared_calls.values())


@pytest.mark.parametrize("tokens", [5, 65])
def test_its_own_checks_accept_indices_as_they_are(tokens: int, package: Any, compiled: Compiled) -> None:
    trial = Trial(tokens=tokens, widths=(64, 9), sinks=(0.5,), outside=False)
    call = trial.run(FlashInferAttention(package, in_range=True), trial.call())

    assert trial.expected.errors(call.out, None).max() <= BUDGET


def test_whatever_ran_once_runs_in_a_capture_and_its_refusal_never_comes_to_light(
    package: Any, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = FlashInferAttention(package)
    known = Trial(heads=12, sinks=(0.5,))
    for lse in (False, True):
        known.run(subject, known.call(lse=lse))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    subject._capturing = lambda: True
    for lse in (False, True):
        known.run(subject, known.call(lse=lse))
    changes: list[dict[str, Any]] = [{"tokens": 3}, {"widths": (7, 9)}, {"blocks": (6, 7)}, {"pages": (4, 4)}]
    for change in changes:
        other = attrs.evolve(known, **change)
        with pytest.raises(UnsupportedError, match="shapes that ran before the capture"):
            other.run(subject, other.call())
