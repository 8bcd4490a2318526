"""Other libraries that `bench` compares with, by their names.

A peer either returns the reason why it is not available, or makes a contender of a case. An exception of a peer becomes
the reason of its row. Results of peers are checked like those of backends. A peer is imported only on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsv4attn.core.contract.backend import Backend, Products
from dsv4attn.tools.bench.attention_peers import FlashInfer, FlashMLA
from dsv4attn.tools.bench.contenders import Contender, Task
from dsv4attn.tools.bench.layer_op_peers import DeepGEMM, FlashInferTopk, SglangTopk, VllmAutoTopk, VllmTopk


class Peer(Protocol):
    """Another library.

    name: name in tables.
    kernels: kernels that it has.
    products: type of its products, by which its results are judged.
    """

    name: str
    kernels: tuple[str, ...]
    products: Products

    def available(self) -> str | None:
        """Why it cannot be used here, or None."""

    def contender(self, task: Task, gatherers: Sequence[Backend], /) -> Contender | None:
        """Its counterpart of a case, or None if it has none. gatherers: backends that may gather rows for it."""


_FROM_VLLM = "vllm", "vllm.v1.attention.ops.flashmla", "is_flashmla_sparse_supported"
_ATTENTION: tuple[Peer, ...] = FlashMLA(), FlashMLA(*_FROM_VLLM), FlashInfer()
_LAYER_OPS: tuple[Peer, ...] = DeepGEMM(), FlashInferTopk(), SglangTopk(), VllmTopk(), VllmAutoTopk()
PEERS = {peer.name: peer for peer in (*_ATTENTION, *_LAYER_OPS)}
"""Peers by their names, those of attention first."""
