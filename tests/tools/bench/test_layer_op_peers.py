"""DeepGEMM and FlashInfer's top-k are called by their public names, on our inputs as they are."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4attn.core.torch_ops.indexer import fp8_mqa_logits, fp8_paged_mqa_logits
from dsv4attn.tools.bench.accuracy import error
from dsv4attn.tools.bench.compressor import compressor_task
from dsv4attn.tools.bench.contenders import Contender, Task
from dsv4attn.tools.bench.hyper_connections import mhc_task
from dsv4attn.tools.bench.index_ops import index_task, select_task
from dsv4attn.tools.bench.layer_op_peers import LAYER_OP_PEERS
from dsv4attn.tools.bench.layer_ops import LayerOpCase

CPU = torch.device("cpu")


def plan(_: Any, page: int, __: int) -> tuple[str, int]:
    return "plan", page


def paged(q: Any, pages: Any, weights: Any, lens: Any, table: Any, plan: Any, most: int) -> Any:
    assert q[1] is None
    assert q[0].shape[1] <= 2, "tokens of a request"
    assert pages.shape[1:] == (64, 1, 132)
    assert plan == ("plan", 64)
    return fp8_paged_mqa_logits(q[0], pages, weights, lens, table, plan, most)


def gathered(q: Any, kv: Any, weights: Any, first: Any, end: Any, most: int) -> Any:
    assert kv[0].shape[0] == most
    # rows are longer than the keys
    return torch.nn.functional.pad(fp8_mqa_logits(q[0], kv, weights, first, end), (0, 60), value=torch.nan)


def product(x: Any, fn: Any, out: Any, squares: Any, splits: int | None) -> None:
    assert x.dtype == torch.bfloat16
    whole = x.float() @ fn.T, x.float().square().sum(-1)
    if splits is None:
        out.copy_(whole[0])
        squares.copy_(whole[1])
    else:
        out.zero_()[splits - 1] = whole[0]
        squares.zero_()[1] = whole[1]


@pytest.fixture
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, infer = ModuleType("deep_gemm"), ModuleType("flashinfer")
    functions: dict[str, Any] = {
        "fp8_fp4_paged_mqa_logits": paged,
        "fp8_fp4_mqa_logits": gathered,
        "get_paged_mqa_logits_metadata": plan,
        "tf32_hc_prenorm_gemm": product,
    }
    for name, function in functions.items():
        setattr(gemm, name, function)
    infer.top_k = torch.topk  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", gemm)
    monkeypatch.setitem(sys.modules, "flashinfer", infer)


def error_of(contender: Contender, task: Task) -> float:
    """Error of a contender's result over results that were spoilt."""
    contender.run()
    contender.reset()
    contender.run()
    expected = task.expected if contender.expected is None else contender.expected
    return error([*zip(contender.results(), expected, strict=True)]).worst


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("name", LAYER_OP_PEERS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_selections_of_peers_are_right(name: str, tokens: int) -> None:
    peer = LAYER_OP_PEERS[name]
    task = select_task(LayerOpCase("select", "paged", "a", 1 if tokens > 2 else 3, tokens, 704), CPU)
    contender = peer.contender(task)

    assert peer.available() is None
    assert contender is not None
    assert contender.name == name
    assert ("flashinfer.top_k" in contender.note) is (name == "flashinfer_topk")
    assert error_of(contender, task) < 1e-5
    contender.reset()
    assert contender.results()[0].isnan().all()


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("step", ["paged", "gathered"])
def test_logits_are_asked_for_on_pages_and_gathered(step: str) -> None:
    requests, tokens = (2, 2) if step == "paged" else (1, 7)
    task = index_task(LayerOpCase("index", step, "a", requests, tokens, 192), CPU)
    contender = LAYER_OP_PEERS["deep_gemm"].contender(task)

    assert contender is not None
    assert error_of(contender, task) < 1e-5


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("tokens", [8, 65])
def test_of_hyper_connections_only_the_product_is_there_and_says_so(tokens: int) -> None:
    peer = LAYER_OP_PEERS["deep_gemm"]
    task = mhc_task(LayerOpCase("mhc", "pre", "a", 1, tokens, hidden=64), CPU)
    contender = peer.contender(task)

    assert contender is not None
    assert (contender.name, len(contender.expected or ())) == ("deep_gemm product", 2)
    assert "nothing else" in contender.note
    assert error_of(contender, task) < 1e-5
    for step in ("post", "post+pre", "head"):
        assert peer.contender(mhc_task(LayerOpCase("mhc", step, "a", 1, 3, hidden=64), CPU)) is None
    assert peer.contender(compressor_task(LayerOpCase("compress", "query index", "a"), CPU)) is None


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)

    assert {name: peer.available() for name, peer in LAYER_OP_PEERS.items()} == {
        "deep_gemm": "deep_gemm is not installed",
        "flashinfer_topk": "flashinfer is not installed",
    }


@pytest.mark.usefixtures("_libraries")
def test_a_top_k_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)

    assert LAYER_OP_PEERS["flashinfer_topk"].available() == "deep_gemm is not installed"
