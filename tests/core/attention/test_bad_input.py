"""`forward_mqa` names each argument that it refuses, and refuses before it writes anything."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, LayoutMismatchError, WorkspaceError
from tests.harness import (
    BF16,
    C4A,
    C128A,
    F32,
    I32,
    KINDS,
    LAYOUT,
    LIMITS,
    OTHER_DIMS,
    PADDED,
    SMALL,
    SWA,
    TOKENS,
    caches_of,
    forward_args,
    metadata_of,
    random_cache,
    storage_of,
)


def memory(caches: LayerCaches) -> list[Tensor]:
    """Return the whole memory of some caches, gaps included."""
    tensors = [cache.tensor for cache in (caches.swa, caches.compressed) if cache is not None]
    return [storage_of(t) for t in tensors if t.device.type == "cpu"]


def held(arguments: dict[str, Any]) -> list[Tensor]:
    """Return every tensor a call may see."""
    tensors = [v for v in arguments.values() if isinstance(v, Tensor) and v.device.type == "cpu"]
    return tensors + memory(arguments["caches"])


def refused(kind: LayerKind, error: type[Exception], said: str, **changes: Any) -> None:
    """Check that the good call with some arguments changed is refused and leaves every tensor as it was."""
    arguments = {**forward_args(kind), **changes}
    tensors = held(arguments)
    copies = [t.clone() for t in tensors]
    with pytest.raises(error, match=said) as info:
        forward_mqa(**arguments)

    assert type(info.value) is error
    assert all(torch.equal(t, b) for t, b in zip(tensors, copies, strict=True)), "written before the error"


@pytest.mark.parametrize("kind", KINDS)
def test_the_good_call_works_and_writes_no_cache(kind: LayerKind) -> None:
    arguments = forward_args(kind)
    caches = [t.clone() for t in memory(arguments["caches"])]
    forward_mqa(**arguments)

    assert bool(arguments["out"].isfinite().all())
    assert not arguments["out"][TOKENS:].any()
    assert bool(arguments["lse"][TOKENS:].eq(-torch.inf).all())
    assert bool(arguments["lse"][:TOKENS].isfinite().all())
    assert all(torch.equal(now, then) for now, then in zip(memory(arguments["caches"]), caches, strict=True))


OUTPUTS: list[tuple[str, Any, str]] = [
    (
        "out",
        torch.full((PADDED, 5, 32), 7.0),
        r"\[T, H, D\] float32 like q with H=4, D=32, T=34, got \[34, 5, 32\] float32$",
    ),
    ("out", torch.full((PADDED + 1, 4, 32), 7.0), r".* got \[35, 4, 32\] float32"),
    ("out", torch.full((PADDED, 4, 16), 7.0), r".* got \[34, 4, 16\] float32"),
    ("out", torch.full((PADDED, 128), 7.0), r".* got \[34, 128\] float32"),
    (
        "out",
        torch.full((PADDED, 4, 32), 7.0, dtype=BF16),
        r"\[T, H, D\] float32 like q .* got \[34, 4, 32\] bfloat16 -> allocate out as torch.float32",
    ),
    ("out", torch.empty(PADDED, 4, 32, device="meta"), "a tensor on cpu, like q, got one on meta"),
    ("out", None, r"a tensor \[T, H, D\] float32 like q with H=4, D=32, T=34, got NoneType"),
    ("q", torch.ones(PADDED, 3, 32), r"\[T, H, D\] bfloat16 or float32 with H=4, D=32, got \[34, 3, 32\] float32"),
    ("q", torch.ones(PADDED, 8, 32), r".* got \[34, 8, 32\]"),
    ("q", torch.ones(PADDED, 4, 40), r".* got \[34, 4, 40\]"),
    ("q", torch.ones(PADDED, 1, 4, 32), r".* got \[34, 1, 4, 32\]"),
    (
        "q",
        torch.ones(PADDED, 4, 32, dtype=torch.float16),
        r".* got \[34, 4, 32\] float16 -> pass q.to\(torch.bfloat16\)",
    ),
    ("attn_sink", torch.zeros(5), r"\[H\] float32 with H=4, got \[5\] float32"),
    ("attn_sink", torch.zeros(1, 4), r".* got \[1, 4\] float32"),
    ("attn_sink", torch.zeros(4, dtype=BF16), r".* got \[4\] bfloat16 -> pass attn_sink.to\(torch.float32\)"),
    ("attn_sink", torch.zeros(4, device="meta"), "a tensor on cpu, like q, got one on meta"),
    ("attn_sink", 0.0, r"a tensor \[H\] float32 with H=4, got float"),
    ("lse", torch.zeros(PADDED, 5), r"\[T, H\] float32 with H=4, T=34, got \[34, 5\] float32"),
    ("lse", torch.zeros(TOKENS, 4), r".* got \[31, 4\] float32"),
    ("lse", torch.zeros(4, PADDED), r".* got \[4, 34\] float32"),
    ("lse", torch.zeros(PADDED, 4, dtype=torch.float64), r".* got \[34, 4\] float64"),
    ("lse", torch.zeros(PADDED, 4, device="meta"), "a tensor on cpu, like q, got one on meta"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("argument", "value", "said"), OUTPUTS, ids=[f"{a}: {s[-32:]}" for a, _, s in OUTPUTS])
def test_a_tensor_of_the_wrong_shape_dtype_or_device_is_refused(
    kind: LayerKind, argument: str, value: object, said: str
) -> None:
    refused(kind, ArgumentError, rf"^{argument}: expected {said}", **{argument: value})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, r"a tensor \[_, K\] int32 with K=3, got NoneType"),
        (
            torch.zeros(PADDED, 3, dtype=torch.int64),
            r"\[_, K\] int32 with K=3, got \[34, 3\] int64 -> pass topk_indices.to\(torch.int32\)",
        ),
        (torch.zeros(PADDED, 1, 3, dtype=I32), r"\[_, K\] int32 with K=3, got \[34, 1, 3\] int32$"),
        (torch.zeros(TOKENS - 1, 3, dtype=I32), r"a row for each of 31 tokens, at most 3 columns, got \[30, 3\]"),
        (torch.zeros(PADDED, 4, dtype=I32), r"a row for each of 31 tokens, at most 3 columns, got \[34, 4\]"),
        (torch.zeros(PADDED, 3, dtype=I32, device="meta"), "a tensor on cpu, like q, got one on meta"),
    ],
)
def test_topk_indices_that_no_indexer_leaves_are_refused(value: Tensor | None, said: str) -> None:
    refused(C4A, ArgumentError, rf"^topk_indices: expected {said}", topk_indices=value)


@pytest.mark.parametrize("kind", [SWA, C128A])
def test_layers_without_an_indexer_do_not_look_at_topk_indices(kind: LayerKind) -> None:
    for topk in (None, torch.zeros(1, 99)):
        forward_mqa(**{**forward_args(kind), "topk_indices": topk})


@pytest.mark.parametrize("rows", [0, TOKENS, 500])
def test_topk_indices_may_have_rows_to_spare_and_no_column_at_all(rows: int) -> None:
    arguments = forward_args(C4A)
    forward_mqa(**{**arguments, "topk_indices": torch.zeros(max(rows, TOKENS), 0 if not rows else 3, dtype=I32)})

    assert bool(arguments["out"].isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_g2_a_window_cache_of_other_dims_but_equal_size_is_refused(kind: LayerKind) -> None:
    assert OTHER_DIMS.record_bytes == LAYOUT.record_bytes
    said = rf"^caches\.swa: expected a layout of 24 \+ 8 dims, as the model has, got {OTHER_DIMS.fingerprint}"

    refused(kind, LayoutMismatchError, said, caches=caches_of(kind, swa=random_cache(OTHER_DIMS, 4, 256)))


@pytest.mark.parametrize("kind", [C4A, C128A])
def test_g2_a_compressed_cache_that_does_not_fit_the_model_or_the_window_is_refused(kind: LayerKind) -> None:
    block_size = 8 if kind is C4A else 2
    other, rows = (
        random_cache(OTHER_DIMS, block_size, 32),
        random_cache(KVCacheLayout.rows(24, 8, dtype=F32), block_size, 32),
    )

    refused(kind, LayoutMismatchError, r"^caches\.compressed: .*24 \+ 8 dims", caches=caches_of(kind, compressed=other))
    said = r"^caches\.compressed: expected rows that read as torch\.bfloat16, like the window cache, got rows/1:float32"
    refused(kind, LayoutMismatchError, said, caches=caches_of(kind, compressed=rows))
    refused(
        kind,
        ArgumentError,
        r"^caches\.compressed: expected the compr.*, got None",
        caches=caches_of(kind, compressed=None),
    )


def test_g2_what_may_differ_between_two_caches_of_a_layer_does_not_hinder() -> None:
    fnuz = random_cache(KVCacheLayout.fp8_ds_mla(24, 8, group_size=16, fp8_format=Fp8Format.FNUZ), 8, 32)
    rows = random_cache(KVCacheLayout.rows(24, 8), 8, 32)
    for compressed in (fnuz, rows):
        arguments = {**forward_args(C4A), "caches": caches_of(C4A, compressed=compressed)}
        forward_mqa(**arguments)
        assert bool(arguments["out"].isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_another_block_size_than_the_metadata_s_are_refused(kind: LayerKind) -> None:
    said = r"^metadata\.swa\.block_size: expected 8 \(records per block of the window cache\), got 4"
    refused(kind, ArgumentError, said, caches=caches_of(kind, swa=random_cache(LAYOUT, 8, 128)))
    if kind is SWA:
        return
    records = 8 if kind is C4A else 2
    said = rf"^metadata\.compressed\.block_size // compress_ratio: expected 16 \(.*\), got {records}"
    refused(kind, ArgumentError, said, caches=caches_of(kind, compressed=random_cache(LAYOUT, 16, 16)))


@pytest.mark.parametrize("kind", KINDS)
def test_caches_or_metadata_on_another_device_are_refused(kind: LayerKind) -> None:
    other_cache = PagedKVCache.allocate(LAYOUT, 256, 4, device="meta")
    refused(kind, ArgumentError, r"^caches\.swa: .*like q, got one on meta", caches=caches_of(kind, swa=other_cache))
    if kind is not SWA:
        other_cache = PagedKVCache.allocate(LAYOUT, 32, 8 if kind is C4A else 2, device="meta")
        said = r"^caches\.compressed: .*like q, got one on meta"
        refused(kind, ArgumentError, said, caches=caches_of(kind, compressed=other_cache))
    moved = {name: forward_args(kind)[name].to("meta") for name in ("q", "out", "attn_sink", "topk_indices", "lse")}
    caches = LayerCaches(PagedKVCache.allocate(LAYOUT, 4, 4, device="meta"), None if kind is SWA else other_cache)
    refused(kind, ArgumentError, r"^metadata\.swa: expected a tensor on meta", **moved, caches=caches)


@pytest.mark.parametrize("kind", [C4A, C128A])
def test_metadata_of_other_layers_or_of_another_batch_is_refused(kind: LayerKind) -> None:
    mine, other = metadata_of(kind), metadata_of(C128A if kind is C4A else C4A)
    refused(
        kind,
        ArgumentError,
        r"^metadata\.compressed: expected metadata of .* layers, got None",
        metadata=metadata_of(SWA),
    )
    said = rf"^metadata\.compressed\.compress_ratio: expected {SMALL.layer_of_kind(kind).compress_ratio} \(the layer's"
    refused(kind, ArgumentError, said, metadata=other)
    fewer = AttentionMetadata(mine.swa, metadata_of(kind, [1, 9], [40, 29]).compressed)
    said = r"^metadata\.compressed\.num_actual_tokens: expected 31 \(the batch\), got 10"
    refused(kind, ArgumentError, said, metadata=fewer)


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_for_another_window_is_refused(kind: LayerKind) -> None:
    wide = metadata_of(kind, geometry=attrs.evolve(SMALL, window=16))

    refused(
        kind, ArgumentError, r"^metadata\.swa\.window_size: expected 8 \(the model's window\), got 16", metadata=wide
    )


def test_what_is_not_caches_or_metadata_is_refused() -> None:
    refused(SWA, ArgumentError, "^metadata: expected AttentionMetadata, got dict", metadata={})
    with pytest.raises(ArgumentError, match=r"^caches: expected LayerCaches, got PagedKVCache"):
        forward_mqa(**{**forward_args(SWA), "caches": forward_args(SWA)["caches"].swa})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_num_batched_tokens": 30}, r"tokens: expected at most 30 \(limits\), got 31"),
        ({"max_num_reqs": 3}, r"requests: expected at most 3 \(limits\), got 4"),
        ({"max_num_reqs": 1}, r"decode tokens: expected at most 1 \(limits\), got 2"),
        ({"max_model_len": 39}, r"max_seq_len: expected at most 39 \(limits\), got 40"),
    ],
)
def test_a_batch_beyond_the_limits_the_workspace_was_planned_for_is_refused(
    kind: LayerKind, limits: dict[str, Any], said: str
) -> None:
    refused(kind, ArgumentError, f"^metadata: {said}", limits=attrs.evolve(LIMITS, **limits))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_more_tokens_than_rows_of_q_is_refused(kind: LayerKind) -> None:
    short: dict[str, Any] = {
        "q": torch.ones(TOKENS - 1, 4, 32),
        "out": torch.full((TOKENS - 1, 4, 32), 7.0),
        "lse": None,
    }

    refused(kind, ArgumentError, r"^metadata: tokens: expected at most 30 \(the rows of q\), got 31", **short)


FORMS = [
    {"prefill_keys": keys, "decode_indices": form, "prefill_indices": form}
    for keys in ("gathered", "paged")
    for form in ("dense", "ragged")
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS, ids=["-".join(f.values()) for f in FORMS])
@pytest.mark.parametrize("arena", ["decode", "prefill"])
def test_g11_a_locked_workspace_that_is_too_small_is_refused_before_any_write(
    kind: LayerKind, form: dict[str, Any], arena: str
) -> None:
    backend = ReferenceBackend(**form)
    plan = plan_workspace(SMALL.layer_of_kind(kind), LIMITS, backend, LAYOUT)
    used = WorkspaceManager()
    forward_mqa(**{**forward_args(kind), "backend": backend, "workspace": used})
    if not used.size(arena):
        forward_mqa(**{**forward_args(kind), "backend": backend, "workspace": locked({**plan.arenas, arena: 0})})
        return
    small = {**plan.arenas, arena: used.size(arena) - 256}
    said = (
        rf"^workspace: reference\.{arena} needs \d+ bytes in arena '{arena}', "
        rf"which is locked at {small[arena]} bytes -> reserve a plan"
    )

    refused(kind, WorkspaceError, said, backend=backend, workspace=locked(small))


def locked(arenas: dict[str, int]) -> WorkspaceManager:
    """Return a workspace of exactly these sizes that may not grow."""
    manager = WorkspaceManager()
    manager.reserve(WorkspacePlan(arenas))
    manager.lock()
    return manager


@pytest.mark.parametrize("kind", KINDS)
def test_g11_a_warm_up_that_may_not_grow_says_so_and_leaves_the_output(kind: LayerKind) -> None:
    refused(kind, WorkspaceError, r"^workspace: warm-up needs \d+ bytes in arena", metadata=None, workspace=locked({}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", ["gathered", "paged"])
def test_g4_a_block_that_does_not_exist_is_absent_in_prefill_where_blocks_are_not_checked(
    kind: LayerKind, keys: str
) -> None:
    """As on accelerators, where looking at a block table would synchronise. The workspace is NaN before use."""
    gone: dict[str, Any] = {
        "block_table": torch.arange(64, dtype=I32).where(torch.arange(64) != 5, -1)[None],
        "compressed_block_table": torch.tensor([[-1, 1, 2, 3, 4, 5, 6, 7]], dtype=I32),
    }
    outs = []
    for workspace, form in ((WorkspaceManager(debug=True), keys), (WorkspaceManager(), "paged")):
        metadata = metadata_of(kind, [9], [29], gone, validate=False)
        arguments = {**forward_args(kind), "metadata": metadata, "workspace": workspace}
        forward_mqa(**{**arguments, "backend": ReferenceBackend(prefill_keys=form)})
        outs.append(arguments["out"])

    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
