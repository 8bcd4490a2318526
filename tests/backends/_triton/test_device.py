"""Promises that need a device: captured graphs, no synchronisation, no allocation, equal bits."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.core.contract.backend import IndexForm, Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from tests.backends._triton.engine import Engine, Request, neither_waiting_nor_allocating
from tests.backends.built_in import forms

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs an accelerator with graphs"),
]

FLASH = ModelGeometry.preset("flash")
REQS = 8
LIMITS = Limits(REQS, 512, 4096, num_speculative_tokens=3)
BACKENDS = forms(DeviceFacts.here())
LISTS = ["decode_swa_ragged", "c128a_decode_ragged"]
GARBAGE = [0, 1, 2**31 - 1, 0x7FC00000, -7, -(2**31)]
"""Slots of other requests, and numbers that are no slots."""
all_kinds = pytest.mark.parametrize("kind", list(LayerKind))
all_backends = pytest.mark.parametrize("name", list(BACKENDS))


def decodes_in_place(backend: TritonBackend) -> bool:
    """Whether decode reads pages where they are: its scratch memory holds parts of rows and no copied keys."""
    arguments = Phase.DECODE, FLASH.layer_of_kind(LayerKind.CSA), REQS, FLASH.window
    return [*backend.scratch(*arguments)] == [*TritonBackend.scratch(backend, *arguments)]


in_parts = pytest.mark.parametrize("name", [name for name, make in BACKENDS.items() if decodes_in_place(make())])


def engine(kind: LayerKind, backend: TritonBackend) -> Engine:
    return Engine(backend, FLASH, LIMITS, kind, torch.device("cuda", 0))


def decode_step(rng: Random, requests: int) -> list[Request]:
    return [(rng.choice([0, 63, 127, 128, 511, 4095, rng.randint(0, 4095)]), 1) for _ in range(requests)]


def eager(on: Engine, requests: list[Request], rng: Random, rows: int | None = None) -> Tensor:
    """Insert and attend a step; its output."""
    batch = on.load(requests, rng, reqs=rows)
    metadata = on.metadata(batch)
    tokens = batch.slot_mapping.shape[0]
    on.insert(tokens, metadata)
    return on.attend(tokens, metadata).clone()


def poison_tails(metadata: dict[str, Any], numbers: list[int]) -> int:
    """Put these after the last row of every ragged list of the metadata, and return how many lists it has."""
    lists = [getattr(part, name, None) for part in metadata.values() for name in LISTS]
    present = [rows for rows in lists if rows is not None]
    for rows in present:
        tail = rows.indices[int(rows.indptr[-1]) :]
        tail.copy_(torch.tensor(numbers, dtype=tail.dtype).repeat(tail.shape[0])[: tail.shape[0]])
    return len(present)


@all_kinds
@all_backends
def test_g10_a_replay_with_changed_metadata_equals_eager_bit_for_bit(name: str, kind: LayerKind) -> None:
    on, rng = engine(kind, BACKENDS[name]()), Random(3)
    padding = on.load([], rng, reqs=REQS)
    metadata = on.metadata(padding, full_width=True)
    on.attend(REQS, metadata)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on.attend(REQS, metadata)
    graph.replay()
    assert not on.out[:REQS].any(), "a batch of padding gives zeros"

    for round_ in range(20):
        requests = decode_step(rng, rng.randint(0, REQS))
        batch = on.load(requests, rng, reqs=REQS)
        on.q[len(requests) : REQS] = torch.nan
        changed = on.metadata(batch, full_width=True)
        tails = poison_tails(changed, GARBAGE)
        on.out.fill_(torch.nan)
        graph.replay()
        replayed = on.out[:REQS].clone()
        poison_tails(changed, [-1])
        on.out.fill_(torch.nan)
        again = on.attend(REQS, changed)

        ragged = on.backend.capabilities.decode_indices is IndexForm.RAGGED
        assert tails == ragged * (2 if kind is LayerKind.HCA else 1)
        assert torch.equal(replayed.view(torch.int16), again.view(torch.int16)), round_
        assert torch.isfinite(replayed).all()
        assert not replayed[len(requests) :].any()


@all_backends
def test_a_prepared_step_runs_on_the_stream_that_is_current(name: str) -> None:
    on, rng = engine(LayerKind.CSA, BACKENDS[name]()), Random(8)
    requests = decode_step(rng, REQS)
    eager(on, requests, rng)
    metadata, queries = on.metadata(on.load(requests, rng)), on.q[:REQS].clone().flip(0)
    first = on.attend(REQS, metadata).clone()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**7)
        on.q[:REQS].copy_(queries)
        result = on.attend(REQS, metadata).clone()
    torch.cuda.synchronize()
    after = on.attend(REQS, metadata).clone()

    assert not torch.equal(first, after)
    assert torch.equal(result.view(torch.int16), after.view(torch.int16))


@all_kinds
@all_backends
def test_g10_g11_a_step_neither_synchronises_nor_allocates(name: str, kind: LayerKind) -> None:
    on, rng = engine(kind, BACKENDS[name]()), Random(5)
    steps = [[(4000, 2), (130, 1), (0, 1)], [(100, 1), (0, 200), (1000, 40)]]
    for requests in steps:
        eager(on, requests, rng)
    batch = on.load(steps[1], rng)
    tokens = batch.slot_mapping.shape[0]
    on.metadata(batch)
    with neither_waiting_nor_allocating():
        metadata = on.metadata(batch)
        on.insert(tokens, metadata)
        on.attend(tokens, metadata)


@all_kinds
@in_parts
def test_g19_a_row_has_the_same_bits_in_any_company(name: str, kind: LayerKind) -> None:
    on, rng = engine(kind, BACKENDS[name](deterministic=True)), Random(7)
    alone = eager(on, [(3000, 1)], Random(1))
    q = on.q[:1].clone()
    for others in range(1, REQS):
        batch = on.load([(3000, 1), *decode_step(rng, others)], Random(1))
        metadata = on.metadata(batch)
        on.q[:1] = q  # normalised already: only attention is repeated
        together = on.attend(batch.slot_mapping.shape[0], metadata)

        assert torch.equal(together[:1].view(torch.int16), alone.view(torch.int16)), others


@all_kinds
@in_parts
def test_g15_g19_verifying_tokens_equals_taking_them_one_by_one(name: str, kind: LayerKind) -> None:
    on = engine(kind, BACKENDS[name](deterministic=True))
    verified = eager(on, [(2047, 4)], Random(2))
    q, kv = on.q[:4].clone(), on.kv[:4].clone()
    topk = on.topk[:4].clone()
    for token in range(4):
        batch = on.load([(2047 + token, 1)], Random(2))
        metadata = on.metadata(batch)
        on.q[0], on.kv[0] = q[token], kv[token]  # normalised already: only attention is repeated
        on.topk[0] = topk[token]
        single = on.attend(1, metadata)

        assert torch.equal(single.view(torch.int16), verified[token : token + 1].view(torch.int16)), token
