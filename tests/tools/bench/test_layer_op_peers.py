"""DeepGEMM and the engines' top-k are called by their public names, on our inputs as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4attn.core.torch_ops.indexer import fp8_mqa_logits, fp8_paged_mqa_logits
from dsv4attn.tools.bench.accuracy import error
from dsv4attn.tools.bench.attention_peers import missing
from dsv4attn.tools.bench.compressor import compressor_task
from dsv4attn.tools.bench.contenders import Contender, Task
from dsv4attn.tools.bench.hyper_connections import mhc_task
from dsv4attn.tools.bench.index_ops import index_task, select_task
from dsv4attn.tools.bench.layer_op_peers import DeepGEMM, _whole_rows
from dsv4attn.tools.bench.layer_ops import LayerOpCase
from dsv4attn.tools.bench.peers import PEERS
from dsv4attn.tools.bench.result import peer_versions
from dsv4attn.tools.bench.runner import MEASURED, WRONG, Runner
from tests.tools.bench.sample_runs import ROOF

CPU = torch.device("cpu")
OF_LAYERS = {name: peer for name, peer in PEERS.items() if isinstance(peer, DeepGEMM)}
SELECTING = [name for name, peer in OF_LAYERS.items() if "select" in peer.kernels]
# as vLLM 0.33's wheel registers them
OPS = {
    "top_k_per_row_prefill": "(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int numRows, "
    "int stride0, int stride1, int topK) -> ()",
    "top_k_per_row_decode": "(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, "
    "int stride1, int topK) -> ()",
    "persistent_topk": "(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) "
    "-> ()",
    "cooperative_topk": "(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) "
    "-> ()",
}
Rows = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""A top-k: logits [T, E], the length of each row, k -> entries [T, k] int32."""


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


def largest(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """The right top-k, which reads no column from a row's length on."""
    assert lens.dtype == torch.int32
    seen = torch.arange(logits.shape[1]) < lens[:, None]
    return logits.masked_fill(~seen, -torch.inf).topk(k).indices.int()


def one_short(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    entries = largest(logits, lens, k)
    entries[-1, -1] = -1
    return entries


def one_twice(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    entries = largest(logits, lens, k)
    entries[0, 3] = entries[0, 4]
    return entries


def not_the_end(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    return largest(logits, (lens - 64).int(), k)


def smallest(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    return largest(-logits, lens, k)


def ragged(choose: Rows) -> Callable[..., torch.Tensor]:
    """FlashInfer's function: it takes rows without gaps, and adds offsets."""

    def top_k_ragged_transform(
        input: torch.Tensor,  # noqa: A002 - FlashInfer's name
        offsets: torch.Tensor,
        lengths: torch.Tensor,
        k: int,
        deterministic: bool = False,
        tie_break: int = 0,
        dsa_graph_safe: bool = False,
        row_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert (deterministic, tie_break, dsa_graph_safe, row_starts) == (False, 0, False, None)
        assert input.is_contiguous()
        assert offsets.dtype == torch.int32
        return choose(input, lengths, k) + offsets[:, None]

    return top_k_ragged_transform


def per_row(choose: Rows) -> dict[str, Callable[..., None]]:
    """Ops of vLLM, which write the entries of rows that they find by strides."""

    def rows(logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor, *shape: int) -> None:
        count, stride, step, k = shape
        assert (count, stride, step) == (len(logits), *logits.stride())
        out.copy_(choose(logits, lens, k))

    def prefill(logits: Any, starts: Any, ends: Any, out: Any, *shape: int) -> None:
        assert not starts.any()
        rows(logits, ends, out, *shape)

    def decode(logits: Any, next_n: int, lens: Any, out: Any, *shape: int) -> None:
        assert lens.shape == (len(logits) // next_n, next_n), "a length for each token"
        rows(logits, lens.flatten(), out, *shape)

    def whole(logits: Any, lens: Any, out: Any, workspace: Any, k: int, longest: int) -> None:
        assert (workspace.dtype, workspace.numel()) == (torch.uint8, 2**20)
        assert (lens.numel(), out.shape) == (len(logits), (len(logits), k))
        assert k in (512, 1024, 2048)
        assert lens.max() <= longest
        out.copy_(choose(logits, lens.flatten(), k))

    def clusters(logits: Any, *rest: Any) -> None:
        assert len(logits) <= 64
        whole(logits, *rest)

    return dict(zip(OPS, (prefill, decode, whole, clusters), strict=True))


def install_sglang(monkeypatch: pytest.MonkeyPatch, choose: Rows) -> None:
    """Stand-ins of SGLang's functions, with the signatures of 0.5.23."""

    def paged(scores: Any, lens: Any, tables: Any, out: Any, page: int, metadata: Any, raw: Any = None) -> None:
        assert (tables, page, raw, metadata) == (None, 1, None, "plan of 1 dim")
        out.copy_(choose(scores, lens, out.shape[1]))

    def ragged(scores: Any, lens: Any, *, out_offsets: Any, out_indices: Any, row_starts: Any = None) -> None:
        assert row_starts is None
        out_indices.copy_(choose(scores, lens, out_indices.shape[1]) + out_offsets[:, None])

    name = "sglang"
    for part in ("", ".kernels", ".ops", ".attention", ".dsv4"):
        name += part
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
    module.plan_topk_v2 = lambda lens: f"plan of {lens.dim()} dim"
    module.topk_transform_paged_v2, module.topk_transform_ragged_v2 = paged, ragged


def install(monkeypatch: pytest.MonkeyPatch, library: torch.library.Library, choose: Rows) -> None:
    """Stand-ins of DeepGEMM, FlashInfer and vLLM. library: where vLLM's ops are implemented."""
    gemm, infer = ModuleType("deep_gemm"), ModuleType("flashinfer")
    functions: dict[str, Any] = {
        "fp8_fp4_paged_mqa_logits": paged,
        "fp8_fp4_mqa_logits": gathered,
        "get_paged_mqa_logits_metadata": plan,
        "tf32_hc_prenorm_gemm": product,
    }
    for name, function in functions.items():
        setattr(gemm, name, function)
    infer.top_k_ragged_transform = ragged(choose)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", gemm)
    monkeypatch.setitem(sys.modules, "flashinfer", infer)
    install_sglang(monkeypatch, choose)
    for name in ("vllm", "vllm._C_stable_libtorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in per_row(choose).items():
        library.impl(name, function, "CPU")


@pytest.fixture
def vllm_ops() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        for name, signature in OPS.items():
            library.define(f"{name}{signature}")
        yield library


@pytest.fixture
def _libraries(monkeypatch: pytest.MonkeyPatch, vllm_ops: torch.library.Library) -> None:
    install(monkeypatch, vllm_ops, largest)


def error_of(contender: Contender, task: Task) -> float:
    """Error of a contender's result over results that were spoilt."""
    contender.run()
    contender.reset()
    contender.run()
    expected = task.expected if contender.expected is None else contender.expected
    return error([*zip(contender.results(), expected, strict=True)]).worst


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize(("tokens", "keys", "topk"), [(1, 704, 512), (2, 704, 512), (5, 704, 512), (1, 1088, 1024)])
def test_selections_of_peers_are_right(name: str, tokens: int, keys: int, topk: int) -> None:
    peer = OF_LAYERS[name]
    task = select_task(LayerOpCase("select", "paged", "a", 1 if tokens > 2 else 3, tokens, keys, topk=topk), CPU)
    contender = peer.contender(task, [])
    phase = "prefill" if tokens > 2 else "decode"
    chooser = {
        "deep_gemm": "torch.topk",
        "flashinfer_topk": "flashinfer.top_k_ragged_transform",
        "sglang_topk": f"SGLang's topk_transform_{'ragged' if tokens > 2 else 'paged'}_v2",
        "vllm_topk": f"vLLM's top_k_per_row_{phase}",
        "vllm_auto_topk": "vLLM's persistent_topk",
    }

    assert peer.available() is None
    if (name, phase) == ("vllm_auto_topk", "prefill"):
        assert contender is None, "it is vllm_topk's"
        return
    assert contender is not None
    assert contender.name == name
    assert contender.note.endswith(f", then {chooser[name]}")
    assert error_of(contender, task) < 1e-5
    contender.reset()
    assert contender.results()[0].isnan().all()


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize(("requests", "op"), [(64, "cooperative_topk"), (65, "persistent_topk")])
def test_vllm_chooses_by_rows_where_there_are_clusters(monkeypatch: pytest.MonkeyPatch, requests: int, op: str) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.layer_op_peers._has_clusters", lambda _: True)
    task = select_task(LayerOpCase("select", "paged", "a", requests, 1, 576), CPU)
    contender = OF_LAYERS["vllm_auto_topk"].contender(task, [])

    assert contender is not None
    assert contender.note.endswith(f"vLLM's {op}")
    assert error_of(contender, task) < 1e-5


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("flashinfer_topk", 1), ("sglang_topk", 1), ("vllm_topk", 1), ("vllm_topk", 5), ("vllm_auto_topk", 1)],
)
@pytest.mark.parametrize("choose", [largest, one_short, one_twice, not_the_end, smallest])
def test_a_peer_that_selects_other_entries_gets_no_time(
    monkeypatch: pytest.MonkeyPatch, vllm_ops: torch.library.Library, name: str, tokens: int, choose: Rows
) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: ROOF)
    install(monkeypatch, vllm_ops, choose)
    (row,) = Runner(CPU, {}, [OF_LAYERS[name]], 1).run(LayerOpCase("select", "paged", "a", 1, tokens, 704))

    assert (row.by, row.is_peer) == (name, True)
    assert (row.state, bool(row.median)) == ((MEASURED, True) if choose is largest else (WRONG, False))


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("step", ["paged", "gathered"])
def test_logits_are_asked_for_on_pages_and_gathered(step: str) -> None:
    requests, tokens = (2, 2) if step == "paged" else (1, 7)
    task = index_task(LayerOpCase("index", step, "a", requests, tokens, 192), CPU)
    contender = OF_LAYERS["deep_gemm"].contender(task, [])

    assert contender is not None
    assert error_of(contender, task) < 1e-5


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("tokens", [8, 65])
def test_of_hyper_connections_only_the_product_is_there_and_says_so(tokens: int) -> None:
    peer = OF_LAYERS["deep_gemm"]
    task = mhc_task(LayerOpCase("mhc", "pre", "a", 1, tokens, hidden=64), CPU)
    contender = peer.contender(task, [])

    assert contender is not None
    assert (contender.name, len(contender.expected or ())) == ("deep_gemm product", 2)
    assert "nothing else" in contender.note
    assert error_of(contender, task) < 1e-5
    for step in ("post", "post+pre", "head"):
        assert peer.contender(mhc_task(LayerOpCase("mhc", step, "a", 1, 3, hidden=64), CPU), []) is None
    assert peer.contender(compressor_task(LayerOpCase("compress", "query index", "a"), CPU), []) is None


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_gemm", "flashinfer", "sglang", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)

    assert {name: peer.available() for name, peer in OF_LAYERS.items()} == {
        "deep_gemm": "deep_gemm is not installed; vllm is not installed",
        "flashinfer_topk": "flashinfer is not installed",
        "sglang_topk": "sglang is not installed",
        "vllm_topk": "vllm is not installed",
        "vllm_auto_topk": "vllm is not installed",
    }


@pytest.mark.usefixtures("_libraries")
def test_a_top_k_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", None)

    why = "deep_gemm is not installed; vllm lacks a module: vllm.third_party.deep_gemm"
    assert [OF_LAYERS[name].available() for name in SELECTING] == [why] * 5


def test_a_wheel_without_the_ops_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm._C_stable_libtorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    assert OF_LAYERS["vllm_topk"].available() == ("vllm's wheel has no op top_k_per_row_prefill, top_k_per_row_decode")


@pytest.mark.usefixtures("_libraries")
def test_deep_gemm_may_be_that_of_vllms_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", sys.modules["deep_gemm"])
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    task = select_task(LayerOpCase("select", "paged", "a", 2, 1, 576), CPU)
    contender = OF_LAYERS["vllm_topk"].contender(task, [])

    assert contender is not None
    assert error_of(contender, task) < 1e-5


def test_rows_with_gaps_are_widened_and_copied_only_if_they_must_be() -> None:
    memory = torch.arange(24.0)
    gaps = memory.view(4, 6)[1:, :5]
    cut = memory[:23].clone().as_strided((4, 5), (6, 1))

    assert _whole_rows(gaps).data_ptr() == gaps.data_ptr()
    assert _whole_rows(gaps).tolist() == memory.view(4, 6)[1:].tolist()
    assert _whole_rows(cut).tolist() == cut.tolist(), "the last row ends with the memory"
    assert _whole_rows(memory.view(6, 4).T).tolist() == memory.view(6, 4).T.tolist()
    assert all(_whole_rows(rows).is_contiguous() for rows in (gaps, cut, memory.view(6, 4).T))


def test_what_a_peer_prints_when_it_is_imported_is_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talkative_peer.py").write_text("print('hello')\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert missing("talkative_peer") is None
    assert capsys.readouterr() == ("", "hello\n")


def test_versions_are_those_of_the_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.result.version_of", lambda name: f"of {name}")
    assert peer_versions([*OF_LAYERS]) == {
        "deep_gemm": "of deep-gemm",
        "flashinfer_topk": "of flashinfer-python",
        "sglang_topk": "of sglang",
        "vllm_topk": "of vllm",
        "vllm_auto_topk": "of vllm",
    }
