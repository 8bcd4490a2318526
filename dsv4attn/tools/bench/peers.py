"""Other libraries that `bench` compares with, by their names.

A peer either returns the reason why it is not available, or makes a contender of a case. An exception of a peer becomes
the reason of its row. Results of peers are checked like those of backends. A peer is imported only on request.
"""

from __future__ import annotations

from dsv4attn.tools.bench.attention_peers import FlashInfer, FlashMLA, Peer
from dsv4attn.tools.bench.layer_op_peers import DeepGEMM, FlashInferTopk, SglangTopk, VllmAutoTopk, VllmTopk

_FROM_VLLM = "vllm", "vllm.v1.attention.ops.flashmla", "is_flashmla_sparse_supported"
_ATTENTION: tuple[Peer, ...] = FlashMLA(), FlashMLA(*_FROM_VLLM), FlashInfer()
_LAYER_OPS: tuple[Peer, ...] = DeepGEMM(), FlashInferTopk(), SglangTopk(), VllmTopk(), VllmAutoTopk()
PEERS = {peer.name: peer for peer in (*_ATTENTION, *_LAYER_OPS)}
"""Peers by their names, those of attention first."""
