"""q that the kernel on rows normalises and rotates: which calls take it, results, mutants, and the measured rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import PREFILL_COST_MODEL
from dsv4attn.core.contract.backend import AttentionOptions, Phase, RawQuery
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.attention.attention_trials import BF16_ROWS, FP32_ROWS, Trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.sm90.attention.mutants import plant
from tests.backends.sm90.calls import Result, measured_lines, run

FLASH, PRO = (ModelGeometry.preset(name) for name in ("deepseek-v4-flash", "deepseek-v4-pro"))
LAYER, BF16 = FLASH.layer_of_kind("c4a"), torch.bfloat16
GATHERED = Trial(layouts=(BF16_ROWS,), form="gathered", widths=(200,), tokens=3, heads=8)
LONG = 700
"""Positions of the table."""


def raw_run(trial: Trial, **options: Any) -> Result:
    """A trial whose q, before norm and rotation, is what the kernel reads; it is judged by the prepared q."""
    g = torch.Generator().manual_seed(trial.seed)
    angles = 6 * torch.rand(LONG, 32, generator=g)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, LONG, (trial.tokens,), generator=g)
    size = torch.exp2(torch.randint(-6, 6, (trial.tokens, trial.heads, 1), generator=g).float())
    scaled = (torch.from_numpy(trial.q).float() * size).to(BF16)
    for row, position in enumerate(positions.tolist()):
        cos, sin = table[position].double().numpy().reshape(2, 32)
        trial.q[row] = oracle.q_norm_rope(scaled[row].double().numpy(), cos, sin, 64, 1e-6)

    def raw(call: Any) -> Any:
        call.q.copy_(scaled)
        options = AttentionOptions(call.max_logits, raw_q=RawQuery(positions.to(DEVICE), table.to(DEVICE), 1e-6))
        return evolve(call, options=options)

    return run(trial, Phase.PREFILL, change=raw, **options)


TRIALS = {
    "few keys": evolve(GATHERED, widths=(70,)),
    "split rows": evolve(GATHERED, widths=(700,), tokens=5, seed=1),
    "a block and a bit": evolve(GATHERED, heads=66, widths=(90,), seed=2),
    "neither lse nor sinks": evolve(GATHERED, wants_lse=False, sink=False, seed=3),
    "no keys": evolve(GATHERED, widths=(0,), seed=4),
}


@pytest.mark.parametrize("name", TRIALS)
def test_the_kernel_normalises_and_rotates_q_of_rows(name: str) -> None:
    result = raw_run(TRIALS[name])

    assert result.is_gluon
    assert result.error <= 1


PLANTS = {
    "forgets the norm": ("factor = tl.rsqrt(", "factor = 1.0 + 0 * tl.rsqrt("),
    "another eps": ("/ 512.0 + eps)", "/ 512.0 + eps + 0.1)"),
    "the norm of one head for all": (
        "tl.rsqrt(tl.sum(",
        "tl.rsqrt(0 * head + tl.max(tl.sum(query * query, 1), 0) + 0 * tl.sum(",
    ),
    "rotates one pair early": ("tl.arange(0, 256) - 224", "tl.arange(0, 256) - 223"),
    "the next row's position": ("positions + token, angles", "positions + tl.minimum(token + 1, tokens - 1), angles"),
    "rotates backwards": ("numerics.rotate(even, odd, cos, sin)", "numerics.rotate(even, odd, cos, -sin)"),
}


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the mutants are in the interpreted kernels")
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, "interpreted", *PLANTS[name])

    assert raw_run(TRIALS["few keys"]).error > 1


def takes(backend: Sm90Backend, layer: Any = LAYER, rows: torch.dtype = BF16, **q: Any) -> bool:
    q_like = torch.empty(4, layer.num_heads, 512, **{"dtype": BF16, "device": "meta", **q})
    return backend.takes_raw_q(layer, q_like, rows, ())


def test_calls_that_the_gluon_kernel_serves_take_raw_q() -> None:
    assert takes(Sm90Backend())
    assert takes(Sm90Backend(prefill="gathered"))
    assert not takes(Sm90Backend(deterministic=True))
    assert not takes(Sm90Backend(), evolve(LAYER, num_heads=129))
    assert not takes(Sm90Backend(), evolve(LAYER, head_dim=576))
    assert not takes(Sm90Backend(), rows=torch.float32)
    assert not takes(Sm90Backend(), dtype=torch.float32)
    unaligned = torch.empty(4 * 64 * 512 + 1, dtype=BF16)[1:].view(4, 64, 512)
    assert not Sm90Backend().takes_raw_q(LAYER, unaligned, BF16, ())


def test_other_calls_refuse_raw_q() -> None:
    rows = evolve(GATHERED, layouts=(FP32_ROWS,))
    with pytest.raises(ArgumentError, match="raw_q: expected None for this call"):
        raw_run(rows)


def measured_steps() -> list[tuple[Any, ...]]:
    """Heads, kind of layer, tokens before a chunk and in it, microseconds on pages, on rows, and with raw q."""
    return [
        (int(heads), kind, int(context), int(tokens), *map(float, times))
        for heads, kind, context, tokens, *times in measured_lines("raw_h200.txt")
    ]


def regret(row: tuple[Any, ...], costs: Any = PREFILL_COST_MODEL) -> float:
    """Time of what is chosen, relative to the best of pages, rows, and rows with raw q."""
    heads, kind, context, tokens, *times = row
    layer = (FLASH if heads == 64 else PRO).layer_of_kind(kind)
    requests = [(context, tokens)]
    count = layer.entries(context + tokens) + min(context + tokens, tokens + layer.window - 1)
    chosen = (
        2 if costs.prefers_raw_q(layer, [(requests, count)]) else int(not costs.prefers_pages(layer, requests, count))
    )
    return float(times[chosen] / min(times))


def test_raw_q_is_chosen_where_it_was_measured_to_be_faster() -> None:
    lost = {row[:4]: regret(row) for row in measured_steps()}

    assert len(lost) == 24
    assert max(lost.values()) < 1.03


@pytest.mark.parametrize("change", [{"raw_start": 1000.0}, {"raw_token": 1.0}, {"prepared": 0.0}, {"least": 4096}])
def test_another_number_chooses_worse(change: dict[str, Any]) -> None:
    costs = evolve(PREFILL_COST_MODEL, **change)

    assert sum(regret(row, costs) > 1.03 for row in measured_steps()) > 1


def test_few_tokens_in_all_have_their_q_prepared() -> None:
    backend, q = Sm90Backend(), torch.empty(1, 64, 512, dtype=BF16, device="meta")

    assert not backend.takes_raw_q(LAYER, q, BF16, [([(9000, 100)], 2400)])
    assert backend.takes_raw_q(LAYER, q, BF16, [([(9000, 100)], 2400), ([(9100, 900)], 3300)])
    assert Sm90Backend(prefill="gathered").takes_raw_q(LAYER, q, BF16, [([(9000, 1)], 2400)])


def test_raw_forms_are_foreseen_where_some_call_may_take_them() -> None:
    limits = Limits(4, 256, 4096)

    def kinds(backend: Sm90Backend, model: ModelGeometry) -> tuple[bool, bool]:
        bounds = WarmupSpec.of(model, limits)
        variants = backend.kernel_variants(evolve(bounds, layers=bounds.layers[:1]), DeviceFacts.here())
        raw = [dict(form.types).get("positions") == "*i64" for form in variants]
        return any(raw), backend._may_leave_raw(bounds, bounds.layers[0])

    assert kinds(Sm90Backend(), FLASH) == (True, True)
    assert kinds(Sm90Backend(prefill="paged"), FLASH) == (False, False)
    assert kinds(Sm90Backend(deterministic=True), FLASH) == (False, False)
    assert kinds(Sm90Backend(), ModelGeometry.preset("deepseek-v4.1-flash")) == (False, False)
