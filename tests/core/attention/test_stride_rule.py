"""The stride rule (G21): strides that kernels would misread are refused before a write; all others are read right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve, fields
from torch import Tensor

from dsv4attn.backends._triton.index_ops import builder
from dsv4attn.backends._triton.index_ops import dense as triton_indices
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import ChunkTokens, PageTable, StepTokens
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.tensorspec import check_strides, has_dense_rows
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.errors import ArgumentError
from tests.harness import (
    BF16,
    C4A,
    I32,
    KINDS,
    LAYOUT,
    LIMITS,
    PADDED,
    SMALL,
    SWA,
    batch_of,
    caches_of,
    forward_args,
    random_cache,
    storage_of,
)

ROWS = "stride 1 in the last dimension"
DENSE = "a dense tensor"
OWN_MEMORY = "rows that share no memory"


def spread(tensor: Tensor) -> Tensor:
    """Equal values, every second element of larger memory in the last dimension; between them is NaN or -77."""
    wide = tensor.repeat_interleave(2, -1)
    wide[..., 1::2] = float("nan") if tensor.is_floating_point() else -77
    return wide[..., ::2]


def columns_of_more(tensor: Tensor) -> Tensor:
    """Equal values as a slice of a fused tensor: twice as many columns in the last dimension but one, or the last."""
    dim = max(tensor.ndim - 2, 1)
    wide = torch.cat([tensor, torch.full_like(tensor, 55)], dim)
    return wide.narrow(dim, 0, tensor.shape[dim])


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of all bytes in the memory of some tensors."""
    return [storage_of(tensor).view(torch.uint8).clone() for tensor in tensors]


def transposed(tensor: Tensor) -> Tensor:
    """Equal values, columns first in memory."""
    return tensor.mT.contiguous().mT


WRONG: list[tuple[str, Any, str]] = [
    ("q", spread, ROWS),
    ("q", transposed, ROWS),
    ("out", spread, ROWS),
    ("out", lambda t: t[:1].expand_as(t), OWN_MEMORY),
    ("out", lambda t: t[:, :1].expand_as(t), OWN_MEMORY),
    ("lse", spread, ROWS),
    ("lse", lambda t: t[:1].expand_as(t), OWN_MEMORY),
    ("attn_sink", spread, DENSE),
    ("attn_sink", lambda _: torch.full((1,), 0.5).expand(4), DENSE),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(WRONG)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "change", "said"), WRONG, ids=IDS)
@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_g21_forward_mqa_refuses_what_kernels_would_misread(
    kind: LayerKind, name: str, change: Any, said: str, *, known: bool
) -> None:
    arguments = forward_args(kind)
    if known:
        forward_mqa(**arguments)
    arguments[name] = change(arguments[name])
    written = [arguments["out"], arguments["lse"]]
    copies = copies_of(written)

    with pytest.raises(ArgumentError, match=f"^{name}: expected {said}.* got strides .* -> ") as info:
        forward_mqa(**arguments)

    assert name in info.value.hint
    assert all(map(torch.equal, copies_of(written), copies))


def test_g21_entry_numbers_are_dense_in_their_rows() -> None:
    arguments = forward_args(C4A)
    arguments["topk_indices"] = spread(arguments["topk_indices"].contiguous())

    with pytest.raises(ArgumentError, match=f"^topk_indices: expected {ROWS}"):
        forward_mqa(**arguments)


@pytest.mark.parametrize("backend", [ReferenceBackend(), GenericBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", KINDS)
def test_g21_rows_may_lie_apart_and_what_lies_between_them_stays(backend: Any, kind: LayerKind) -> None:
    plain, apart = {**forward_args(kind), "backend": backend}, {**forward_args(kind), "backend": backend}
    for name in ("q", "out", "lse", "topk_indices"):
        apart[name] = columns_of_more(apart[name])
    forward_mqa(**plain)
    forward_mqa(**apart)

    for name in ("out", "lse"):
        torch.testing.assert_close(apart[name], plain[name], atol=0, rtol=0, equal_nan=True)
        dim = max(apart[name].ndim - 2, 1)
        size = apart[name].shape[dim]
        both = storage_of(apart[name]).view(*(n * (1 + (i == dim)) for i, n in enumerate(apart[name].shape)))
        assert bool((both.narrow(dim, size, size) == 55).all()), f"{name}: written next to its rows"


FIELDS = ["query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "slot_mapping", "block_table"]


@pytest.mark.parametrize("name", [*FIELDS, "compressed_block_table"])
def test_g21_a_batch_is_dense_in_its_rows(name: str) -> None:
    tensor = getattr(batch_of([1, 1], [9, 17]), name)
    said = DENSE if tensor.ndim == 1 else ROWS

    with pytest.raises(ArgumentError, match=rf"^Batch\.{name}: expected {said}"):
        batch_of([1, 1], [9, 17], **{name: spread(tensor)})
    if tensor.ndim == 2:
        with pytest.raises(ArgumentError, match=rf"^Batch\.{name}: expected {said}"):
            batch_of([1, 1], [9, 17], **{name: transposed(tensor)})
        assert batch_of([1, 1], [9, 17], **{name: columns_of_more(tensor)}) is not None


def backend_ops() -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
    """Arguments of every op that a backend offers besides attention; and what is said of its strided tensors."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    cache, positions, table = random_cache(LAYOUT, 4, 16), torch.arange(5), cos_sin_cache(SMALL.layer(0).rope, 64)
    lens = torch.tensor([5, 3], dtype=I32)
    insert: dict[str, Any] = {
        "q": random(5, 4, 32),
        "kv": random(5, 32),
        "slot_mapping": positions + 3,
        "positions": positions,
    }
    insert |= {"cache": cache, "cos_sin_cache": table, "eps": 1e-6}
    gather: dict[str, Any] = {
        "out": random(2, 8, 32).to(BF16),
        "cache": cache,
        "seq_lens": lens,
        "gather_lens": lens,
        "offset": 1,
    }
    gather["block_table"] = torch.arange(8, dtype=I32).view(2, 4)
    project = {"o": random(5, 4, 32), "positions": positions, "cos_sin_cache": table, "wo_a": random(32, 64)}
    said = {1: DENSE, 2: ROWS, 3: ROWS}
    arguments: dict[str, dict[str, Any]] = {
        "quantize_and_insert_k_cache": {"k": random(5, 32), "slot_mapping": positions + 3, "cache": cache},
        "qnorm_rope_kv_insert": insert,
        "dequantize_and_gather_k_cache": gather,
        "inv_rope_o_proj": {**project, "num_groups": 2},
    }
    return {
        op: (arguments[op], {n: said[t.ndim] for n, t in arguments[op].items() if isinstance(t, Tensor)})
        for op in arguments
    }


BACKEND_OPS = [(op, name, said) for op, (_, names) in backend_ops().items() for name, said in names.items()]


@pytest.mark.parametrize("backend", [ReferenceBackend(), GenericBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(("op", "name", "said"), BACKEND_OPS, ids=[f"{op}-{name}" for op, name, _ in BACKEND_OPS])
def test_g21_an_op_refuses_strided_elements_and_serves_strided_rows(
    backend: Any, op: str, name: str, said: str
) -> None:
    def run(change: Any = lambda tensor: tensor) -> tuple[Any, list[Tensor]]:
        arguments, _ = backend_ops()[op]
        arguments[name] = change(arguments[name])
        written = [arguments["cache"].tensor] if "cache" in arguments else []
        written += [arguments[name] for name in ("q", "out") if name in arguments]
        copies = copies_of(written)
        try:
            return getattr(backend, op)(**arguments), written
        except ArgumentError:
            assert all(map(torch.equal, copies_of(written), copies)), "written before the error"
            raise

    with pytest.raises(ArgumentError, match=f"^{name}: expected {said}"):
        run(spread)
    if said == DENSE:
        return
    plain, apart = run(), run(columns_of_more)
    if plain[0] is not None:
        assert torch.equal(apart[0], plain[0])
    for now, then in zip(apart[1], plain[1], strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("backend", [ReferenceBackend(), GenericBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", torch.zeros(5, 24)),
        ("k", torch.zeros(5, 48)),
        ("k", torch.zeros(5, 2, 32)),
        ("k", torch.zeros(5, 32, dtype=torch.float16)),
        ("slot_mapping", torch.zeros(5, dtype=I32)),
        ("slot_mapping", torch.zeros(5, 1, dtype=torch.int64)),
    ],
    ids=["narrow", "wide", "heads", "fp16", "int32", "a column"],
)
def test_keys_of_another_shape_or_dtype_are_refused_before_a_write(backend: Any, name: str, value: Tensor) -> None:
    arguments = {**backend_ops()["quantize_and_insert_k_cache"][0], name: value}
    copies = copies_of([arguments["cache"].tensor])

    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        backend.quantize_and_insert_k_cache(**arguments)
    assert all(map(torch.equal, copies_of([arguments["cache"].tensor]), copies))


@pytest.mark.parametrize("backend", [ReferenceBackend(), GenericBackend()], ids=lambda backend: backend.name)
def test_g21_a_bound_layer_refuses_them_too(backend: Any) -> None:
    geometry, arguments, table = SMALL.layer_of_kind(SWA), forward_args(SWA), cos_sin_cache(SMALL.layer(0).rope, 256)
    layer = DeepseekV4MLAAttention("l", geometry, LIMITS, backend, attn_sink=torch.zeros(4), cos_sin_cache=table)
    layer.bind_kv_cache(caches_of(SWA).swa)
    q, kv, positions = arguments["q"], torch.randn(PADDED, 32), torch.arange(PADDED)
    with set_forward_context({"l.swa_cache": arguments["metadata"].swa}):
        for name, pair in {
            "q": (spread(q), kv, positions),
            "kv": (q, spread(kv), positions),
            "positions": (q, kv, spread(positions)),
        }.items():
            with pytest.raises(ArgumentError, match=f"^{name}: expected "):
                layer.fused_qnorm_rope_kv_insert(*pair)
    for name, wo_a, o in (("wo_a", spread(torch.randn(32, 64)), q), ("o", torch.randn(32, 64), spread(q))):
        with pytest.raises(ArgumentError, match=f"^{name}: expected {ROWS}"):
            layer.o_proj(o, positions, wo_a, 2)


def test_rows_of_a_cache_do_not_share_memory() -> None:
    rows = torch.zeros(4, 8, 32)
    for shared in (rows[:1].expand_as(rows), rows[:, :1].expand_as(rows)):
        with pytest.raises(ArgumentError, match=f"^cache tensor: expected {OWN_MEMORY}"):
            PagedKVCache(shared, KVCacheLayout.rows(24, 8, dtype=torch.float32))


def test_the_rule_itself() -> None:
    block = torch.zeros(6, 4, 8)

    assert all(map(has_dense_rows, (block, block[:, :2], block[::2], block[:1].expand_as(block), block[:0])))
    assert has_dense_rows(block[:, :, :1])
    assert not has_dense_rows(block[..., ::2])
    assert not has_dense_rows(torch.zeros(1).expand(4))
    assert has_dense_rows(torch.zeros(1).expand(1))
    assert has_dense_rows(block.transpose(0, 1), written=True)
    assert has_dense_rows(block[:, :2], written=True)
    assert not has_dense_rows(block[:1].expand_as(block), written=True)
    assert not has_dense_rows(block.as_strided((6, 4, 8), (8, 8, 1)), written=True)
    assert has_dense_rows(block[:0].expand(0, 4, 8), written=True)
    check_strides(absent=None, scalar=torch.zeros(()))


def index_ops() -> dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]]:
    """Arguments of every index op, and what it writes to."""
    starts, lens, valid = (
        torch.tensor([0, 2, 5], dtype=I32),
        torch.tensor([9, 17], dtype=I32),
        torch.ones(5, dtype=torch.bool),
    )
    request, table = torch.tensor([0, 0, 1, 1, 1], dtype=I32), torch.arange(16, dtype=I32).view(2, 8)
    topk, visible = torch.tensor([[0, 1, -1]] * 5, dtype=I32), torch.tensor([2, 2, 3, 3, 4], dtype=I32)

    def new(*shape: int, dtype: torch.dtype = I32) -> Tensor:
        return torch.full(shape, 55, dtype=dtype)

    rows: dict[str, Any] = {"block_table": table, "block_size": 4}
    chosen: dict[str, Any] = {"topk_indices": topk, "visible_lens": visible, "token_to_req": request, **rows}
    lengths: dict[str, Any] = {"query_start_loc": starts, "seq_lens": lens}
    tokens: dict[str, Any] = {"tokens": StepTokens(**lengths, token_to_req=request, is_valid=valid)}
    paged = {**tokens, "pages": PageTable(table, 4)}
    chunk = ChunkTokens(
        **lengths, gather_lens=lens, visible_lens=visible, is_valid=valid, window=4, topk=3, rows=40, offset=20
    )
    combine = {"topk_indices": topk, "tokens": chunk}
    pack: dict[str, Any] = {"indices": topk, "lens": visible, "num_slots": 2}
    return {
        "compute_global_topk_indices_and_lens": (chosen, (new(5, 3), new(5))),
        "compute_global_topk_ragged_indices_and_indptr": (chosen, (new(15), new(6))),
        "build_ragged_indices_from_dense": (pack, (new(15), new(6))),
        "combine_topk_swa_indices": (combine, (new(5, 7), new(5))),
        "build_token_maps": ({"query_start_loc": starts, "slot_mapping": torch.arange(5)}, (new(5), valid.clone())),
        "build_window_indices": ({**paged, "window": 4}, (new(5, 4), new(5))),
        "build_gather_lens": ({**lengths, "window": 4}, (new(2),)),
        "build_compressed_slot_mapping": ({**paged, "ratio": 2}, (new(5, dtype=torch.int64), new(5))),
        "build_cached_mask": ({**tokens, "num_cached": lens - 2, "ratio": 2}, (valid.clone(),)),
        "build_owned_slot_mapping": (
            {"ownership": Ownership(1, 2), **paged, "ratio": 2},
            (new(5, dtype=torch.int64), new(5)),
        ),
    }


def tensors_of(arguments: dict[str, Any]) -> Iterator[str]:
    """Names of tensors among arguments, and "argument.field" of those in structs."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name
        elif isinstance(value, (StepTokens, ChunkTokens, PageTable)):
            yield from (
                f"{name}.{attribute.name}"
                for attribute in fields(type(value))
                if isinstance(getattr(value, attribute.name), Tensor)
            )


def spread_one(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """The arguments, with one of `tensors_of` spread."""
    argument, _, field = name.partition(".")
    value = arguments[argument]
    changed = evolve(value, **{field: spread(getattr(value, field))}) if field else spread(value)
    return {**arguments, argument: changed}


@pytest.mark.parametrize("op", index_ops())
def test_g21_an_index_op_serves_any_input_it_does_not_refuse(op: str) -> None:
    """With each tensor strided in turn, a kernel gives what torch gives, or an error and nothing."""
    names, outs = [*tensors_of(index_ops()[op][0])], range(len(index_ops()[op][1]))
    for name in [*names, *outs]:
        results = []
        for module in (indices, builder, triton_indices):
            function = getattr(module, op, None)
            if function is None:
                continue
            arguments, out = index_ops()[op]
            if isinstance(name, str):
                arguments = spread_one(arguments, name)
            else:
                out = (*out[:name], spread(out[name]), *out[name + 1 :])
            copies = copies_of([*out])
            try:
                first, *_ = arguments
                function(arguments.pop(first), **arguments, out=out if len(out) > 1 else out[0])
            except ArgumentError:
                assert all(map(torch.equal, copies_of([*out]), copies)), f"{name}: written before the error"
                continue
            # entries after the last row of a ragged list are undefined
            used = [out[0][: int(out[1][-1])], out[1]] if "ragged" in op else out
            results.append([tensor.clone() for tensor in used])
        for other in results[1:]:
            assert all(map(torch.equal, other, results[0])), f"{op}: {name} is misread"
