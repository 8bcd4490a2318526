"""A decode over ranks writes its result into the send buffer: nothing is packed, and no bit differs."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.attention import forward_mqa_over_ranks, merge_over_ranks
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from tests.core.context_parallel.test_context_parallel_buffers import alone
from tests.harness import I32, SMALL, batch_of, random_cache, same_bits
from tests.testing.mutants_rank_ops import Merges

LIMITS = Limits(4, 64, 256, num_speculative_tokens=1)
PADDED = 7


class Counted(Merges):
    """Counts how often a part is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = 0

    def pack_partial(self, out: Tensor, lse: Tensor, sent: Tensor, sent_lse: Tensor) -> None:
        self.packed += 1
        super().pack_partial(out, lse, sent, sent_lse)


def step_arguments(
    query: list[int], dtype: torch.dtype, kind: LayerKind, dims: tuple[int, int], heads: int
) -> dict[str, Any]:
    """Arguments of a step of rank 0 of 2, whose first request has no entry yet; rows after its tokens are padding."""
    model = attrs.evolve(SMALL, num_heads=heads, head_dim=sum(dims), rope_dim=dims[1], o_groups=1)
    layer, layout = model.layer_of_kind(kind), KVCacheLayout.rows(*dims, dtype=dtype)
    batch = batch_of(query, [2, 97, 200], compressed_block_table=torch.arange(3 * 4, dtype=I32).view(3, 4))
    sizes: dict[str, Any] = {"swa_block_size": 4, "compressed_block_tokens": 32}
    builder = OwnedMetadataBuilder(Ownership(0, 2), model, LIMITS, **sizes, backend=Counted(), prefill_keys=False)
    draw = torch.Generator().manual_seed(1)
    return {
        "q": torch.randn(PADDED, heads, sum(dims), generator=draw).to(dtype),
        "caches": LayerCaches(random_cache(layout, 4, 192), random_cache(layout, 32 // layer.compress_ratio, 12)),
        "metadata": builder.build_for(batch, [kind])[kind],
        "layer": layer,
        "limits": LIMITS,
        "topk_indices": torch.tensor([[-1] * 3, [0, 5, 7], *[[1, 2, 24]] * 5], dtype=I32),
    }


def run(step: dict[str, Any], workspace: WorkspaceManager, out: Tensor, lse: Tensor | None, sink: Tensor) -> Counted:
    backend = Counted()
    call = ForwardCall(**step, backend=backend, workspace=workspace, out=out, attn_sink=sink, lse=lse)
    forward_mqa_over_ranks(alone(), call)
    return backend


def merged(step: dict[str, Any], sink: Tensor) -> tuple[Tensor, Tensor]:
    """The same of `forward_mqa` and a merge that packs."""
    out, lse = torch.full_like(step["q"], torch.nan), torch.full(step["q"].shape[:2], torch.nan)
    workspace, backend = WorkspaceManager(), Counted()
    forward_mqa(**step, backend=backend, workspace=workspace, out=out, attn_sink=None, lse=lse)
    merge_over_ranks(alone(), out, lse, sink, workspace, backend=backend)
    assert backend.packed > 0
    return out, lse


@pytest.mark.parametrize("kind", [LayerKind.CSA, LayerKind.HCA])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    ("query", "dtype", "dims", "heads", "pieces", "packed"),
    [
        ([1, 1, 1], torch.float32, (24, 8), 4, 0, 0),
        ([1, 2, 1], torch.bfloat16, (24, 8), 4, 0, 0),
        ([2, 2, 2], torch.bfloat16, (24, 8), 1, 0, 0),
        # lse would begin at 7 x 2 x 12 bytes
        ([1, 1, 1], torch.bfloat16, (8, 4), 1, 0, 1),
        # 3 of 7 rows in an exchange
        ([1, 1, 1], torch.float32, (24, 8), 4, 3, 3),
        # a prefill after one decode: tokens of each are a piece
        ([1, 1, 3], torch.float32, (24, 8), 4, 0, 2),
    ],
)
def test_a_decode_is_not_packed_and_no_bit_differs(
    query: list[int],
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: int,
    pieces: int,
    packed: int,
    kind: LayerKind,
    monkeypatch: pytest.MonkeyPatch,
    *,
    with_lse: bool,
) -> None:
    if pieces:
        monkeypatch.setattr(rank_buffers, "PIECE_BYTES", pieces * 2 * heads * (sum(dims) * dtype.itemsize + 4))
    step, sink = step_arguments(query, dtype, kind, dims, heads), torch.linspace(-1, 1, heads)
    expected, expected_lse = merged(step, sink)
    workspace = WorkspaceManager(debug=True)
    workspace.reserve(plan_workspace(step["layer"], LIMITS, Counted(), step["caches"].swa.layout, ranks=2))
    workspace.lock()
    for _ in range(2):
        # rows that lie apart
        out = torch.full((heads, PADDED, sum(dims) + 8), torch.nan, dtype=dtype).transpose(0, 1)[..., : sum(dims)]
        lse = torch.full((PADDED, heads + 3), torch.nan)[:, :heads] if with_lse else None
        backend = run(step, workspace, out, lse, sink)
        workspace.check_canaries()

        assert backend.packed == packed
        assert same_bits(out, expected)
        assert lse is None or same_bits(lse, expected_lse)
    assert bool((out[sum(query) :] == 0).all())
    assert lse is None or bool((lse[sum(query) :] == -torch.inf).all())


def test_a_prepared_decode_is_run_with_other_addresses() -> None:
    step, sink = step_arguments([1, 1, 1], torch.float32, LayerKind.CSA, (24, 8), 4), torch.zeros(4)
    workspace, prepared, backend = WorkspaceManager(), step["metadata"].swa.prepared, Counted()
    expected, _ = merged(step, sink)
    prepared.clear()
    for _ in range(2):
        out = torch.full_like(step["q"], torch.nan)
        call = ForwardCall(**step, backend=backend, workspace=workspace, out=out, attn_sink=sink)
        forward_mqa_over_ranks(alone(), call)

        assert same_bits(out, expected)
    assert len(prepared) == 1
    # views of a workspace that has moved are not used again
    workspace.get_simultaneous(((2**20,), torch.uint8), arena=rank_buffers.ARENA)
    out = torch.full_like(step["q"], torch.nan)
    forward_mqa_over_ranks(alone(), attrs.evolve(call, out=out))

    assert same_bits(out, expected)
    assert backend.packed == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("out", {"out": torch.zeros(PADDED, 4, 64)[..., ::2]}),
        ("out", {"out": torch.zeros(PADDED, 4, 32, dtype=torch.bfloat16)}),
        ("out", {"out": torch.zeros(PADDED - 1, 4, 32)}),
        ("lse", {"lse": torch.zeros(PADDED, 4, dtype=torch.float64)}),
        ("lse", {"lse": torch.zeros(PADDED, 5)}),
    ],
)
def test_tensors_of_the_caller_are_checked_though_others_are_written(name: str, change: dict[str, Any]) -> None:
    step = step_arguments([1, 1, 1], torch.float32, LayerKind.CSA, (24, 8), 4)
    good: dict[str, Any] = {"out": torch.zeros(PADDED, 4, 32), "lse": torch.zeros(PADDED, 4)}
    workspace = WorkspaceManager()
    run(step, workspace, **good, sink=torch.zeros(4))
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        run(step, workspace, **{**good, **change}, sink=torch.zeros(4))
