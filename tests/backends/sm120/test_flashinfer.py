"""FlashInfer under our contract, with its wrapper played by `recording`: numbers, memory, and what is refused."""

from __future__ import annotations

import inspect
from math import inf, log
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn.backends.sm120.flashinfer import FlashInferAttention
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.errors import ArgumentError, LayoutMismatchError, UnsupportedError
from dsv4attn.testing.kit.tolerances import tolerance
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import launching_nothing
from tests.backends.sm120.decode_calls import LAYOUT, Trial, installed_flashinfer
from tests.backends.sm120.fake_flashinfer import HEADS, RecordingWrapper

BUDGET = tolerance(LAYOUT, torch.bfloat16)
SINKS = {
    "none": None,
    "no effect": (-inf,),
    "all": (inf,),
    "large": (1e4,),
    "small": (-1e4,),
    "mixed": (-inf, inf, 0.7),
}


def attention(*, in_range: bool = False, **options: Any) -> FlashInferAttention:
    return FlashInferAttention(installed_flashinfer(), in_range=in_range, **options)


def calls_of(subject: FlashInferAttention) -> list[dict[str, Any]]:
    return [call for wrapper in subject._wrappers.values() for call in wrapper.calls]


# numbers


@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize(
    ("heads", "tokens"),
    [(1, 5), (3, 65), (8, 5), (9, 5), (16, 5), (40, 65), (32, 5), (64, 5), (65, 5), (100, 5), (128, 5)],
)
def test_any_number_of_heads_agrees_with_float64(heads: int, tokens: int, lse: bool) -> None:
    trial = Trial(heads=heads, tokens=tokens, sinks=(0.4, -inf, 2.5, inf), seed=heads)
    call = trial.run(attention(), trial.call(lse=lse, pad=3))

    assert trial.expected.errors(call.out, call.lse).max() <= BUDGET + lse * 2**-9


@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize("name", SINKS)
def test_every_sink_leaves_the_lse_alone_and_scales_the_output(name: str, heads: int, lse: bool) -> None:
    trial = Trial(heads=heads, tokens=7, sinks=SINKS[name])
    call = trial.run(attention(), trial.call(lse=lse))

    assert trial.expected.errors(call.out, call.lse).max() <= BUDGET + lse * 2**-9
    if name in ("all", "large"):
        assert not call.out.any()


@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize("empty", [-inf, inf, -1e30])
def test_rows_without_keys_are_zero_and_their_lse_is_what_the_call_says(empty: float, name: str, heads: int) -> None:
    trial = Trial(heads=heads, sinks=SINKS[name])
    call = trial.run(attention(), trial.call(lse=True, empty_lse=empty))

    assert not call.out[::3].any()
    assert call.lse is not None
    assert (call.lse[::3] == empty).all()
    assert call.lse[1].isfinite().all()


@pytest.mark.parametrize("widths", [(64, 0), (6, 0), (6, 9), (128, 70), (100, 64)])
@pytest.mark.parametrize("tokens", [1, 64, 66])
def test_few_and_many_tokens_of_any_width_agree_with_float64(tokens: int, widths: tuple[int, int]) -> None:
    trial = Trial(tokens=tokens, widths=widths, sinks=(0.5,))
    call = trial.run(attention(), trial.call(lse=True, pad=1))

    assert trial.expected.errors(call.out, call.lse).max() <= BUDGET + 2**-9


def test_one_page_and_pages_of_one_record_are_read_where_they_are() -> None:
    for pages, blocks in (((1, 1), (9, 11)), ((9, 3), (1, 1)), ((64, 2), (2, 5))):
        trial = Trial(pages=pages, blocks=blocks)
        call = trial.run(attention(), trial.call())

        assert trial.expected.errors(call.out, None).max() <= BUDGET
        for arguments in calls_of_fresh(trial):
            assert [arguments["kv_cache"].data_ptr(), arguments["extra_kv_cache"].data_ptr()] == [
                cache.tensor.data_ptr() for cache, _ in trial.caches
            ]


def calls_of_fresh(trial: Trial) -> list[dict[str, Any]]:
    subject = attention()
    trial.run(subject, trial.call())
    return calls_of(subject)


@pytest.mark.parametrize("tokens", [5, 66])
def test_a_cache_without_pages_or_columns_is_left_out(tokens: int) -> None:
    for blocks, widths in (((5, 0), (6, 9)), ((0, 7), (6, 9)), ((5, 7), (0, 9)), ((0, 0), (6, 9))):
        trial = Trial(tokens=tokens, blocks=blocks, widths=widths, sinks=(0.5,))
        subject = attention()
        call = trial.run(subject, trial.call(lse=True))

        assert trial.expected.errors(call.out, call.lse).max() <= BUDGET + 2**-9
        # once for the lse and once for out
        assert [call["extra_kv_cache"] for call in calls_of(subject)] == ([None] * 2 if any(blocks) else [])


def test_heads_of_padding_reach_nobody() -> None:
    trial = Trial(heads=12, tokens=65, sinks=(0.5,))
    subject = attention()
    trial.run(subject, trial.call())
    few = attrs.evolve(trial, tokens=5)
    few.run(subject, few.call())
    call, of_few = calls_of(subject)

    assert call["q"].shape == call["output"].shape == (65, 16, 512)
    assert not call["q"][:, 12:].any()
    assert (call["attn_sink"][12:] == -inf).all()
    assert of_few["q"] is few.q


def test_what_rows_without_keys_are_told_may_change_from_call_to_call() -> None:
    trial, subject = Trial(), attention()
    for empty in (-inf, 0.0, -inf, -1e30, 0.0):
        call = trial.run(subject, trial.call(lse=True, empty_lse=empty))

        assert call.lse is not None
        assert (call.lse[::3] == empty).all()


def test_a_key_that_is_not_a_number_makes_its_own_rows_so_and_no_others() -> None:
    trial = Trial(sinks=(-inf, 0.5))
    poisoned = trial.call(lse=True, empty_lse=0.0)
    slots = poisoned.keys[0].rows  # type: ignore[index]
    assert isinstance(slots, DenseIndices)
    slots.indices[1, 0], slots.lens[1] = 1, 2
    trial.run(attention(), poisoned)

    assert poisoned.lse is not None
    assert poisoned.out[1].isnan().all()
    assert poisoned.lse[1].isnan().all()
    assert not poisoned.out[[0, 2, 3, 4]].isnan().any()


# memory


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [4, 65])
def test_where_heads_need_no_padding_nothing_is_copied(heads: int, tokens: int) -> None:
    trial = Trial(heads=heads, tokens=tokens, widths=(64, 9), sinks=(0.5,), outside=False)
    subject = attention(in_range=True)
    trial.run(subject, trial.call())
    results = trial.run(subject, trial.call(lse=True))
    plain, with_lse, with_sink = calls_of(subject)

    assert len(subject.scratch(trial.layer, tokens, 64, 9)) == 4
    assert plain["q"] is trial.q
    assert plain["attn_sink"] is trial.sink
    assert (with_lse["attn_sink"], with_sink["attn_sink"]) == (None, trial.sink)
    assert with_lse["output"] is with_sink["output"] is results.out
    assert with_sink["out_lse"] is not results.lse
    assert with_lse["out_lse"] is results.lse
    for segment, names in zip(results.keys, ("indices topk_length", "extra_indices extra_topk_length"), strict=True):  # type: ignore[arg-type]
        assert isinstance(segment, PagedKeys)
        assert [with_lse[name] for name in names.split()] == [segment.rows.indices, segment.rows.lens]  # type: ignore[union-attr]


def test_scratch_is_what_decode_kernels_write_and_nothing_for_prefill_kernels() -> None:
    parts, sums, whole, again = attention(in_range=True).scratch(Trial(heads=64).layer, 64, 128, 1024)
    few, none, *_ = attention(in_range=True).scratch(Trial(heads=64).layer, 65, 128, 1024)

    assert parts == ((64, 64, 18, 512), torch.bfloat16)
    assert sums == ((64, 64, 18), torch.float32)
    assert whole == again == ((64, 64), torch.float32)
    assert [few[0], none[0]] == [(8,), (4,)]


class Fresh(TorchDispatchMode):
    """Storages of results that no argument has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in memory:
            self.made.append(str(func))
        return result


class Nothing(RecordingWrapper):
    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch nothing."""


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("tokens", [5, 65])
def test_a_run_allocates_nothing_and_reads_nothing(tokens: int, heads: int, lse: bool) -> None:
    trial = Trial(heads=heads, tokens=tokens, sinks=(0.5,))
    subject = FlashInferAttention(installed_flashinfer(Nothing))
    call = trial.call(lse=lse, empty_lse=0.0)
    specs = subject.scratch(trial.layer, tokens, *trial.widths)
    views = [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape, dtype in specs]
    subject.run(call, views)  # the first one makes a wrapper
    with launching_nothing(), Fresh() as fresh:
        subject.run(call, views)

    assert fresh.made == []


def test_the_lse_is_asked_for_in_base_e_and_never_returned() -> None:
    (call,) = calls_of_fresh(Trial())

    assert call["lse_scale"] == pytest.approx(log(2))
    assert call["return_lse"] is False
    assert call["prefill_impl"] is None


def test_an_lse_with_columns_apart_gets_its_own_memory() -> None:
    trial = Trial(sinks=(0.5,))
    wide = torch.full((5, 16), torch.nan, device=DEVICE)
    call = attrs.evolve(trial.call(), lse=wide[:, ::2])
    trial.run(attention(), call)

    assert trial.expected.errors(call.out, call.lse).max() <= BUDGET + 2**-9
    assert wide[:, 1::2].isnan().all()


# graphs


def test_shapes_that_never_ran_are_refused_in_a_capture_and_known_ones_run() -> None:
    capturing = False
    subject = attention(capturing=lambda: capturing)
    trial = Trial(sinks=(0.5,))
    trial.run(subject, trial.call())
    capturing = True
    trial.run(subject, trial.call())
    others = [attrs.evolve(trial, **change) for change in ({"tokens": 4}, {"widths": (6, 8)}, {"sinks": None})]
    for other, options in [*((other, {}) for other in others), (trial, {"lse": True})]:
        call = other.call(**options)
        with pytest.raises(UnsupportedError, match=r"captured graph.*before the capture.*call once"):
            other.run(subject, call)
        assert call.out.isnan().all()

    assert len(calls_of(subject)) == 2


def test_a_gpu_can_be_asked_whether_it_is_capturing_and_a_cpu_never_is() -> None:
    assert callable(torch.get_device_module("cuda").is_current_stream_capturing)
    assert not attention()._is_capturing(torch.device("cpu"))


def test_no_tokens_are_no_call() -> None:
    trial = Trial(tokens=0)
    subject = attention()
    trial.run(subject, trial.call(lse=True))

    assert not subject._wrappers


# refusals


def test_what_flashinfer_cannot_take_is_refused_before_any_write() -> None:
    trial = Trial(outside=False)
    call, (window, entries) = trial.call(lse=True), trial.keys()
    assert isinstance(window.rows, DenseIndices)
    wide = torch.zeros(5, 8, 1024, dtype=torch.bfloat16, device=DEVICE)
    odd = torch.zeros(2**16, dtype=torch.uint8, device=DEVICE)
    near = PagedKVCache(odd.as_strided((3, 4, 584), (2344, 584, 1)), LAYOUT)
    unaligned = PagedKVCache(odd[8:].as_strided((3, 4, 584), (4672, 584, 1), 8), LAYOUT)
    fnuz = PagedKVCache(window.cache.tensor, KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ))
    ragged = RaggedIndices(torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), 3)
    apart = DenseIndices(window.rows.indices, torch.zeros(5, 2, dtype=torch.int32)[:, 0])
    changes: list[tuple[str, dict[str, Any]]] = [
        ("q: expected contiguous", {"q": wide[..., ::2]}),
        (
            "tensors: expected q, out and caches to begin at multiples of 16 bytes",
            {"q": wide.view(-1)[1:20481].view(5, 8, 512)},
        ),
        ("out: ", {"out": wide[..., :512]}),
        ("attn_sink: ", {"attn_sink": torch.zeros(16)[::2]}),
        ("keys: expected pages", {"keys": GatheredKeys(torch.zeros(4, 512), window.rows)}),
        ("keys: expected one or two", {"keys": (window, entries, entries)}),
        ("indices: expected dense", {"keys": (PagedKeys(window.cache, ragged), entries)}),
        ("cache: expected pages at multiples of 16", {"keys": (PagedKeys(near, window.rows), entries)}),
        ("caches to begin at multiples of 16", {"keys": (window, PagedKeys(unaligned, entries.rows))}),
        ("lens: ", {"keys": (PagedKeys(window.cache, apart), entries)}),
    ]
    for text, change in changes:
        wrong = attrs.evolve(call, **change)
        with pytest.raises(ArgumentError, match=text):
            trial.run(attention(), wrong)
    with pytest.raises(LayoutMismatchError, match="e4m3fnuz"):
        trial.run(attention(), attrs.evolve(call, keys=(PagedKeys(fnuz, window.rows), entries)))

    assert call.out.isnan().all()
    assert call.lse is not None
    assert call.lse.isnan().all()


@pytest.mark.parametrize(("tokens", "widths", "pad"), [(65, (48, 9), 0), (65, (64, 9), 1)])
def test_indices_that_must_not_be_copied_must_be_as_prefill_takes_them(
    tokens: int, widths: tuple[int, int], pad: int
) -> None:
    trial = Trial(tokens=tokens, widths=widths, outside=False)
    with pytest.raises(ArgumentError, match=r"whole tiles of 64.*in_range"):
        trial.run(attention(in_range=True), trial.call(pad=pad))


def test_too_many_heads_and_a_wrapper_that_cannot_be_made_are_said_by_name() -> None:
    trial = Trial(heads=129)
    with pytest.raises(UnsupportedError, match="num_heads: expected at most 128, got 129"):
        attention().scratch(trial.layer, 5, 6, 9)

    class Broken(RecordingWrapper):
        refuses = RuntimeError("no nvcc here")

    with pytest.raises(UnsupportedError, match="RuntimeError: no nvcc here"):
        Trial().run(FlashInferAttention(installed_flashinfer(Broken)), Trial().call())


def test_the_recording_refuses_what_no_kernel_takes() -> None:
    trial = Trial(tokens=65, widths=(48, 0))
    (arguments,) = calls_of_fresh(trial)
    wrapper = RecordingWrapper(device=arguments["q"].device)
    named = {name: arguments[name] for name in inspect.signature(RecordingWrapper.run).parameters if name != "self"}
    wrapper.run(**named)
    for change, text in (
        ({"indices": arguments["indices"][:, :48]}, "no kernel"),
        ({"q": arguments["q"].float()}, "q: contiguous"),
        ({"out_lse": arguments["out_lse"].half()}, "out_lse"),
        ({"kv_cache": arguments["kv_cache"][:, :, :, :576]}, "packed rows"),
    ):
        with pytest.raises(ValueError, match=text):
            wrapper.run(**named | change)
