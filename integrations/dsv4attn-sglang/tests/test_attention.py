"""SGLang's attention of DeepSeek-V4 runs on dsv4attn: SGLang's own cases, against its reference and our oracle.

Each test builds SGLang's `DeepseekV4AttnBackend` over its pools of caches, lets it write keys and make the metadata of
a step, and calls its `forward`. SGLang's reference takes keys before they are rounded to fp8, so its bound is loose
(0.08); our oracle takes the records that SGLang wrote, in float64.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from typing import Any

import fakes
import numpy as np
import pytest
import torch
from kit import case
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import read_row
from dsv4attn.testing.oracle.attention import attend_row

LAYOUT = KVCacheLayout.fp8_ds_mla()
TEST = unittest.TestCase()


class Calls:
    """What SGLang gave to FlashMLA's functions, and what it got."""

    def __init__(self) -> None:
        self.decode: list[tuple[dict[str, Any], Tensor]] = []
        self.prefill: list[tuple[dict[str, Any], Tensor]] = []


@pytest.fixture
def calls(interface: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Calls of a test, each of them compared with the oracle at the end."""
    recorded_calls = Calls()
    for name, kept in (
        ("flash_mla_with_kvcache", recorded_calls.decode),
        ("flash_mla_sparse_fwd", recorded_calls.prefill),
    ):
        monkeypatch.setattr(interface, name, recorded(getattr(interface, name), kept))
    yield recorded_calls
    for arguments, out in recorded_calls.decode:
        check_decode(arguments, out)
    for arguments, out in recorded_calls.prefill:
        check_prefill(arguments, out)
    assert not fakes.flash_mla_calls()


def recorded(function: Callable[..., Any], kept: list[tuple[dict[str, Any], Tensor]]) -> Callable[..., Any]:
    """The function, which keeps its arguments and its output."""

    def call(**arguments: Any) -> Any:
        result = function(**arguments)
        kept.append((arguments, result[0].clone()))
        return result

    return call


def records(cache: Tensor, indices: Tensor, length: int) -> np.ndarray[Any, Any]:
    """Keys [K, 512] of the records that one row of indices names."""
    size, slots = cache.shape[1], [slot for slot in indices[:length].tolist() if 0 <= slot < cache.shape[:2].numel()]
    pages = {slot // size: cache[slot // size].reshape(-1).view(torch.uint8).numpy() for slot in slots}
    read = [read_row(pages[slot // size][place_of(LAYOUT, slot % size, size)], LAYOUT) for slot in slots]
    return np.stack(read) if read else np.zeros((0, 512))


def assert_near(got: Tensor, want: np.ndarray[Any, Any]) -> None:
    """The bound of FlashMLA's own tests."""
    error = (got.double() - torch.from_numpy(want)).abs()
    assert bool(((error < 1e-3) | (error / (torch.from_numpy(want).abs() + 1e-6) < 2.01 / 128)).all()), error.max()


def check_decode(arguments: dict[str, Any], out: Tensor) -> None:
    """Compare a call of `flash_mla_with_kvcache` with the oracle, row by row."""
    second = arguments["extra_k_cache"] is not None
    for row in range(out.shape[0]):
        keys = [records(arguments["k_cache"], arguments["indices"][row, 0], int(arguments["topk_length"][row]))]
        if second:
            extra = arguments["extra_indices_in_kvcache"][row, 0], int(arguments["extra_topk_length"][row])
            keys.append(records(arguments["extra_k_cache"], *extra))
        q, sink = arguments["q"][row, 0].detach().double().numpy(), arguments["attn_sink"].double().numpy()
        want, _ = attend_row(q, np.concatenate(keys), sink, arguments["softmax_scale"])
        assert_near(out[row, 0], want)


def check_prefill(arguments: dict[str, Any], out: Tensor) -> None:
    """Compare a call of `flash_mla_sparse_fwd` with the oracle, row by row."""
    rows = arguments["kv"][:, 0]
    for row in range(out.shape[0]):
        chosen = arguments["indices"][row, 0, : int(arguments["topk_length"][row])]
        keys = rows[chosen[(chosen >= 0) & (chosen < rows.shape[0])].long()].double().numpy()
        q, sink = arguments["q"][row].detach().double().numpy(), arguments["attn_sink"].double().numpy()
        want, _ = attend_row(q, keys, sink, arguments["sm_scale"])
        assert_near(out[row], want)


WINDOW_STEPS = {
    "first prompts and a second chunk": ("EXTEND", (0, 130), (9, 5)),
    "across pages": ("EXTEND", (250,), (12,)),
    "decode within and past the window": ("DECODE", (5, 200, 128), ()),
}
"""Steps of layers with a window alone: mode, tokens of each request in the caches, and new ones."""
COMPRESSED_STEPS = {
    "decode": ("DECODE", (60, 130), ()),
    "paged prompt": ("EXTEND", (100,), (6,)),
    "gathered prompt": ("EXTEND", (120,), (10,)),
}
"""Steps of layers with a compressed cache."""


def run_window(kit: Any, calls: Calls, step: str) -> None:
    """Run a step of a layer with a window alone."""
    mode, prefixes, extends = WINDOW_STEPS[step]
    kit.run_dsv4_attention_case(TEST, case(step, mode, prefixes, extends), device="cpu")

    assert [len(calls.decode), len(calls.prefill)] == ([1, 0] if mode == "DECODE" else [0, 1])


def run_compressed(kit: Any, calls: Calls, step: str, ratio: int) -> None:
    """Run a step of a layer with a compressed cache of this ratio."""
    is_gathered = step == "gathered prompt"
    kit_case = case(step, *COMPRESSED_STEPS[step], compress_ratio=ratio)
    kit.run_dsv4_compress_attention_case(TEST, kit_case, sparse_prefill=is_gathered, device="cpu")

    assert [len(calls.decode), len(calls.prefill)] == ([0, 1] if is_gathered else [1, 0])


@pytest.mark.parametrize("step", WINDOW_STEPS)
def test_layers_with_a_window_alone(kit: Any, backend: str, calls: Calls, step: str) -> None:
    run_window(kit, calls, step)


@pytest.mark.parametrize("ratio", [4, 128, 2, 1])
@pytest.mark.parametrize("step", COMPRESSED_STEPS)
def test_layers_with_a_compressed_cache(kit: Any, backend: str, calls: Calls, ratio: int, step: str) -> None:
    run_compressed(kit, calls, step, ratio)

    extra = {1: 256, 2: 128, 4: 64, 128: 2}[ratio]
    for arguments, _ in calls.decode:
        assert (arguments["k_cache"].shape[1:], arguments["extra_k_cache"].shape[1:]) == (
            (256, 1, 584),
            (extra, 1, 584),
        )
        assert arguments["use_legacy"] is True


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_drafts_are_verified(kit: Any, backend: str, calls: Calls, ratio: int) -> None:
    kit_case = case("verify", "TARGET_VERIFY", (40, 140), (3, 3), compress_ratio=ratio)
    kit.run_dsv4_target_verify_attention_case(TEST, kit_case, device="cpu")

    assert [arguments["q"].shape[:2] for arguments, _ in calls.decode] == [(6, 1)]


def test_drafts_are_made(kit: Any, backend: str, calls: Calls) -> None:
    kit_case = case("draft", "DRAFT_EXTEND_V2", (40, 140), (3, 3))
    kit.run_dsv4_draft_extend_attention_case(TEST, kit_case, device="cpu")

    assert len(calls.decode) == 1


def test_the_oracle_sees_a_wrong_output(kit: Any, calls: Calls) -> None:
    kit.run_dsv4_attention_case(TEST, case("decode", "DECODE", (5, 200)), device="cpu")
    [(arguments, out)] = calls.decode

    with pytest.raises(AssertionError):
        check_decode(arguments, out * 1.05)
    with pytest.raises(AssertionError):
        check_decode({**arguments, "attn_sink": arguments["attn_sink"] + 1}, out)
