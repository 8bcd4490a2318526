"""Steps of vLLM's own layers, builders and compressor with dsv4attn in them, of DeepSeek-V4 and of V4.1.

They are compared with steps that dsv4attn's own builder describes, and with the oracle.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import dsv4attn_vllm
import pytest
import torch
from dsv4attn_vllm import metadata
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.metadata import Described
from engine import PAGES, Engine, bytes_of, config_of, world
from models import V4, V41, V41_WITH_PARTS, Model, engine_of
from torch import Tensor
from vllm.forward_context import set_forward_context

import dsv4attn as ds
from dsv4attn.errors import ArgumentError


def name_of(pair: tuple[Model, str]) -> str:
    return " ".join(map(str, pair))


@pytest.fixture(params=[(V4, "reference"), (V4, "triton"), (V41, "reference")], ids=name_of)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_of(*request.param) as layers:
        yield layers


on_v4 = pytest.mark.parametrize("engine", [(V4, "reference"), (V4, "triton")], ids=name_of, indirect=True)
with_steps_too = pytest.mark.parametrize(
    "engine",
    [(V4, "reference"), (V4, "triton"), (V41, "reference"), (V41_WITH_PARTS, "reference")],
    ids=name_of,
    indirect=True,
)

STEPS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "decode": ([(150, 1), (40, 1)], 2),  # decodes, and rows that a captured piece has after them
    "prefill": ([(0, 70)], 0),  # a fresh prompt
    "mixed": ([(150, 1), (40, 1), (129, 30)], 3),  # two decodes and the next chunk of a prompt
    "edges": ([(0, 1), (255, 1), (511, 1)], 0),  # a prompt of one token; steps that complete entries of both ratios
    "short": ([(131, 1), (40, 1), (13, 7)], 1),
}
STEPS_OF = [
    ((V4, "reference"), ("decode", "prefill", "mixed", "edges")),
    ((V4, "triton"), ("decode", "prefill", "mixed", "edges")),
    ((V41, "reference"), ("decode", "prefill", "mixed")),
    ((V41, "triton"), ("short",)),
]


@pytest.mark.parametrize(
    ("engine", "requests", "extra_rows"),
    [pytest.param(pair, *STEPS[step], id=f"{name_of(pair)} {step}") for pair, several in STEPS_OF for step in several],
    indirect=["engine"],
)
def test_a_step_is_what_own_builder_and_oracle_say(
    engine: Engine, requests: list[tuple[int, int]], extra_rows: int
) -> None:
    rows = sum(count for _, count in requests)

    engine.check_step(requests, [0, rows // 2, rows - 1], extra_rows=extra_rows)


@on_v4
def test_layers_of_a_kind_get_one_frozen_object(engine: Engine) -> None:
    work = [(engine.request(9), 1)]

    metadata = engine.describe(work)

    swa = metadata["model.layers.1.attn.swa_cache"].dsv4attn
    assert isinstance(swa, ds.WindowMetadata)
    assert metadata["model.layers.1.attn"].dsv4attn.kind is ds.LayerKind.CSA
    assert metadata["model.layers.2.attn"].dsv4attn.kind is ds.LayerKind.HCA
    # nothing is copied: vLLM's kernels write these buffers
    assert swa.decode_swa_indices.data_ptr() == metadata["model.layers.1.attn.swa_cache"].decode_swa_indices.data_ptr()
    with pytest.raises(AttributeError):
        swa.block_size = 1


of_both_models = pytest.mark.parametrize(
    "engine", [(V4, "reference"), (V41_WITH_PARTS, "reference")], ids=name_of, indirect=True
)

WRITTEN = {
    "is_valid_token",
    "token_to_req_indices",
    "decode_swa_indices",
    "decode_swa_lens",
    "req_id_per_token",
    "compressed_lens",
    "c128a_global_decode_topk_indices",
    "c128a_decode_topk_lens",
}
"""Tensors that builders write to buffers of their own. engine.py makes all others anew in each step."""


def written(by_prefix: Mapping[str, Any]) -> dict[tuple[str, str], Tensor]:
    """These tensors of dsv4attn's metadata of a step, by prefix and name. The metadata were not made before."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for prefix, described in by_prefix.items():
        if isinstance(described, Described):
            fields = attrs.asdict(described.dsv4attn, recurse=False)
            tensors |= {(prefix, name): fields[name] for name in WRITTEN & fields.keys() if fields[name] is not None}
    return tensors


@of_both_models
def test_what_captured_graphs_read_is_written_before_a_layer_asks(engine: Engine) -> None:
    """A graph was captured with the metadata of a first step. In a second one, where it is replayed, no layer asks."""
    work = [(engine.request(150), 1), (engine.request(127), 1)]
    captured = written(engine.describe(work))
    before = {key: value.clone() for key, value in captured.items()}
    for request, _ in work:
        request.tokens += 1

    replayed = engine.describe(work)

    described = [step for step in replayed.values() if isinstance(step, Described)]
    assert not any("dsv4attn" in vars(step) for step in described)
    now = {key: value.clone() for key, value in captured.items()}
    changed = {name for (prefix, name) in now if not torch.equal(before[prefix, name], now[prefix, name])}
    assert {"decode_swa_indices", "compressed_lens"} <= changed
    expected = written(replayed)
    assert expected.keys() == captured.keys()
    for key, value in expected.items():
        assert value.data_ptr() == captured[key].data_ptr(), key
        assert torch.equal(value, now[key]), key


@of_both_models
def test_builders_call_few_functions_of_dsv4attn_in_a_step(engine: Engine) -> None:
    """As few for many requests as for one. A step that replays a captured graph waits for the host."""
    ours = (*ds.__path__, *dsv4attn_vllm.__path__, "<attrs generated")
    calls: list[list[str]] = []

    def note(frame: Any, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ours):
            calls[-1].append(code.co_name)

    for count in (1, 4):
        work = [(engine.request(9), 1) for _ in range(count)]
        calls.append([])
        sys.setprofile(note)
        try:
            engine.describe(work)
        finally:
            sys.setprofile(None)

    few, many = calls
    assert few == many
    builders = {builder for groups in engine.groups for group in groups for builder in group.metadata_builders}
    assert 0 < len(few) <= 4 * len(builders), few


def test_builders_of_a_group_count_the_tokens_of_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so for another group or another number of tokens, nor where vLLM changes the same object for a next step."""
    counted: list[Tensor] = []
    positions_of = metadata.positions_of

    def counting(step: Any) -> Tensor:
        counted.append(positions_of(step))
        return counted[-1]

    monkeypatch.setattr(metadata, "positions_of", counting)
    slots = torch.tensor([7, -1, 8, 9])
    step = SimpleNamespace(positions=torch.tensor([3, 200, 511, 512]), slot_mapping=slots, num_actual_tokens=4)
    first, second = (torch.full((6,), 99, dtype=torch.int32) for _ in range(2))

    def entries(ratio: int, buffer: Tensor, step: Any = step) -> list[int]:
        result: list[int] = metadata.visible_entries(step, ratio, buffer).tolist()
        assert buffer.tolist() == [*result, *[99] * (6 - len(result))]
        return result

    assert (entries(4, first), entries(128, second)) == ([1, 0, 128, 128], [0, 0, 4, 4])
    assert len(counted) == 1
    of_other_group, shorter = SimpleNamespace(**vars(step)), SimpleNamespace(**vars(step))
    of_other_group.slot_mapping, shorter.num_actual_tokens = torch.tensor([7, 5, 8, -1]), 2
    assert entries(4, torch.full((6,), 99, dtype=torch.int32), of_other_group) == [1, 50, 128, 0]
    assert entries(4, torch.full((6,), 99, dtype=torch.int32), shorter) == [1, 0]
    step.positions += 100
    assert (entries(4, first), entries(128, second)) == ([26, 0, 153, 153], [0, 0, 4, 4])
    assert len(counted) == 4


def test_prompts_on_a_backend_that_takes_raw_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and caches are those of prepared q, bit for bit; the insert leaves q of prefill tokens as it was."""
    from dsv4attn_vllm import serving

    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    results = []
    for raw in (False, True):
        serving._serving.cache_clear()
        torch.manual_seed(0)
        config = config_of()
        with world(config):
            engine = Engine(config, CUDAAttention)
            backend = engine.layers[0]._serving.backend
            monkeypatch.setattr(backend, "_raw_q", raw)
            first, second = engine.request(9), engine.request(4)
            outs = engine.step([(first, 70)])
            # a decode next to a prompt, with rows of padding
            outs += [out[:34] for out in engine.step([(first, 1), (second, 33)], extra_rows=2)]
            caches = [layer.swa_cache_layer.kv_cache.clone() for layer in engine.layers]
            results.append((outs, caches, [engine.queries[layer.prefix] for layer in engine.layers]))
        serving._serving.cache_clear()
    (outs, caches, prepared), (raw_outs, raw_caches, queries) = results

    assert all(torch.equal(a, b) for a, b in zip(outs + caches, raw_outs + raw_caches, strict=True))
    for a, b in zip(prepared, queries, strict=True):
        assert torch.equal(a[:1], b[:1])
        assert not (a[1:34] == b[1:34]).flatten(1).all(1).any()


@on_v4
def test_keys_alone_are_refused_before_anything_is_written(engine: Engine) -> None:
    layer, request = engine.layers[0], engine.request(9)
    slots = engine.describe([(request, 2)])[layer.swa_cache_layer.prefix].slot_mapping
    _, kv, _ = engine.inputs(layer, [(request, 2)], 2)
    written = layer.swa_cache_layer.kv_cache.clone()

    with pytest.raises(ArgumentError, match=r"^slot_mapping\b"):
        layer.insert_keys(kv, engine.positions[:2], torch.tensor([1, PAGES * 64]))
    with pytest.raises(ArgumentError, match=r"^positions\b"):
        layer.insert_keys(kv, torch.tensor([0, len(layer.rotary_emb.cos_sin_cache)]), slots)

    assert torch.equal(layer.swa_cache_layer.kv_cache, written)


def test_metadata_none_reserves_memory_and_zeroes_the_output(engine: Engine) -> None:
    from vllm.v1.worker.workspace import lock_workspace

    q = torch.randn(5, 4, 512).bfloat16()
    for layer in engine.layers:
        out, serving = torch.ones_like(q), layer._serving
        with set_forward_context(None, engine.config, num_tokens=5):
            assert layer._fused_qnorm_rope_kv_insert(q, q[:, 0], engine.positions[:5], None) is q
            layer.forward_mqa(q, q[:, 0], engine.positions[:5], out)

        assert not out.any()
        plan = ds.plan_workspace(layer._geometry, serving.limits, serving.backend, serving.swa_layout)
        assert all(serving.workspace().size(arena) >= size for arena, size in plan.arenas.items())
    lock_workspace()
    assert serving.workspace().locked
    engine.step([(engine.request(150), 1), (engine.request(), 40)])  # all of it fits


@on_v4
def test_memory_of_every_microbatch_and_lane_is_reserved_before_vllm_locks_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM measures memory without microbatches; drafts run in a lane of their own, and are measured in it."""
    from vllm.v1.worker import workspace

    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"), num_ubatches=2, num_lanes=2)
    work = [(engine.request(150), 1), (engine.request(), 20)]
    q = torch.randn(5, 4, 512).bfloat16()
    for layer, lane in itertools.product(engine.layers, (0, 1)):
        with set_forward_context(None, engine.config, num_tokens=5), workspace.use_workspace_lane(lane):
            layer.forward_mqa(q, q[:, 0], engine.positions[:5], torch.empty_like(q))
    workspace.lock_workspace()
    outs, spaces = [], []
    for microbatch in (0, 1):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: microbatch)  # noqa: B023 - called in this pass
        for lane in (0, 1):
            with workspace.use_workspace_lane(lane):
                outs.append(engine.step(work))
                spaces.append(engine.layers[0]._serving.workspace())
            for request, count in work:
                request.tokens -= count

    assert len({id(space) for space in spaces}) == 4
    assert all(space.locked for space in spaces)
    assert len({space.total_bytes for space in spaces}) == 1
    assert all(
        torch.equal(left, right)
        for outs_of_another in outs[1:]
        for left, right in zip(outs[0], outs_of_another, strict=True)
    )


@on_v4
def test_a_worker_without_a_workspace_has_its_own(engine: Engine) -> None:
    """VLLM's worker for CPUs makes none."""
    from vllm.v1.worker.workspace import reset_workspace_manager

    request = engine.request(150)
    expected = engine.step([(request, 1)])
    request.tokens -= 1
    reset_workspace_manager()

    outs = engine.step([(request, 1)])

    assert all(map(torch.equal, expected, outs))
    spaces = [layer._serving.workspace() for layer in engine.layers]
    assert all(space is spaces[0] for space in spaces)
    assert spaces[0].total_bytes
    assert not spaces[0].locked


PADDING = {"tokens": {"pad": 2}, "requests too": {"pad": 2, "pad_requests": 2}, "not in metadata": {"extra_rows": 2}}
"""Rows after the tokens of a step: vLLM's piecewise graphs, graphs of whole decode steps, and captured pieces."""


def check_padding(engine: Engine, padding: dict[str, int]) -> None:
    """Two decodes have the same outputs and caches, states too, with padding as without; padding sees nothing."""
    work = [(engine.request(150), 1), (engine.request(33), 1)]
    blank = {name: bytes_of(cache) for name, cache in engine.bound().items()}
    alone = engine.step(work)
    caches = {name: bytes_of(cache) for name, cache in engine.bound().items()}
    for name, cache in engine.bound().items():
        cache.copy_(blank[name].view(cache.dtype))
    for request, _ in work:
        request.tokens -= 1

    padded = engine.step(work, **padding)

    for out, out_with_padding in zip(alone, padded, strict=True):
        assert torch.equal(out, out_with_padding[:2])
        assert not out_with_padding[2:].any()
    assert [name for name, cache in engine.bound().items() if not torch.equal(bytes_of(cache), caches[name])] == []
    for request, _ in work:
        request.tokens -= 1
    described = engine.describe(work, **{name: count for name, count in padding.items() if name != "extra_rows"})
    nothing = [0] * padding.get("pad", 0)
    for layer in owners(engine):
        ratio, lens = layer.compress_ratio, described[layer.prefix].dsv4attn.compressed_lens
        assert lens.tolist() == [151 // ratio, 34 // ratio, *nothing]


def owners(engine: Engine) -> list[Any]:
    """Layers that own a compressed cache."""
    return [layer for layer in engine.layers if engine.entries_of(layer) is layer]


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@with_steps_too
def test_padding_of_a_captured_batch_is_zero_and_inserts_nothing(engine: Engine, padding: dict[str, int]) -> None:
    check_padding(engine, padding)


@pytest.mark.parametrize(
    ("engine", "mask"),
    [
        ((V4, "reference"), "visible_entries"),
        ((V41_WITH_PARTS, "reference"), "visible_entries_of_replayed"),
        ((V41_WITH_PARTS, "reference"), "requests of tokens"),
    ],
    ids=["V4", "V4.1", "requests"],
    indirect=["engine"],
)
def test_a_removed_mask_of_padding_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    from dsv4attn_vllm import index_metadata, metadata

    build = metadata.V41StateMetadataBuilder.build

    def all_visible(common: Any, ratio: int, buffer: Tensor, *_: Tensor) -> Tensor:
        return buffer[: common.num_actual_tokens].copy_((metadata.positions_of(common) + 1) // ratio)

    def without_mask(*arguments: Any, **options: Any) -> Any:
        described = build(*arguments, **options)
        described.requests = described.token_to_req_indices[: len(described.requests)]
        return described

    if mask == "requests of tokens":
        monkeypatch.setattr(metadata.V41StateMetadataBuilder, "build", without_mask)
    else:
        for module in (metadata, index_metadata):
            monkeypatch.setattr(module, mask, all_visible)

    for padding in (PADDING["tokens"], PADDING["requests too"]):
        with pytest.raises(AssertionError):
            check_padding(engine, padding)


@pytest.mark.parametrize("same_step", [True, False], ids=["same metadata", "next step"])
@with_steps_too
def test_compressed_caches_alone_that_are_bound_again_are_read_and_written(engine: Engine, same_step: bool) -> None:
    """By the layers that own them and by those that share them. The bytes that were bound before are NaN.

    Window caches and states stay where they are.
    """
    request = engine.request(147)  # the next token completes an entry of two and of four
    work = [(request, 1)]
    metadata = engine.describe(work)

    def outputs() -> list[Tensor]:
        with set_forward_context(metadata, engine.config, num_tokens=1):
            engine.select(work)
            return [engine.run(layer, metadata, work, 1) for layer in engine.layers]

    copies = {}
    for layer in owners(engine):
        shape, stride = layer.kv_cache.shape, layer.kv_cache.stride()
        copies[layer] = torch.empty_strided(shape, stride, dtype=torch.uint8).copy_(layer.kv_cache)
    expected = outputs()
    for layer, copy in copies.items():
        # caches of several groups lie in one memory: only the request's own pages are overwritten
        layer.kv_cache[request.blocks[engine.group_of(layer.prefix)]] = 0xFF
        layer.kv_cache = copy
    if not same_step:
        metadata = engine.describe(work)

    outs = outputs()

    assert all(map(torch.equal, expected, outs))
    assert not any(out.isnan().any() for out in outs)


@on_v4
def test_o_proj_equals_vllms_torch_path(engine: Engine) -> None:
    layer, rows = engine.layers[1], 6
    o, positions = torch.randn(rows, 4, 512).bfloat16(), torch.arange(rows) * 37

    y = layer._o_proj(o, positions)

    rotated = layer.rotary_emb.forward_native(positions, o.clone(), None, inverse=True)[0]
    z = torch.einsum("tgd,grd->tgr", rotated.float().view(rows, 2, 1024), layer.wo_a.weight.float().view(2, 64, 1024))
    expected = z.flatten(1) @ layer.wo_b.weight.float().T
    assert y.shape == (rows, 256)
    assert torch.allclose(y.float(), expected, rtol=0.02, atol=0.02 * expected.abs().max())
