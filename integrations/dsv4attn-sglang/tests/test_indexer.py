"""SGLang's indexer on a GPU without DeepGEMM: scores and selection on dsv4attn, all else SGLang's own.

Each test builds SGLang's `DeepseekV4AttnBackend` on a machine that SGLang takes for one of capability 8.0, 8.6 or 8.9,
lets it make the metadata of a step, and calls its `forward_c4_indexer`. SGLang's compiled kernels do not run on a CPU:
queries and index keys are made here, in SGLang's formats. Slots and entry numbers are compared with SGLang's own torch
functions, `fp8_paged_mqa_logits_torch` and `topk_transform_pytorch_vectorized`, and with float64.
"""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fakes
import pytest
import torch
from attrs import define
from dsv4attn_sglang import indexer, parts, serving
from kit import case, runner_of
from torch import Tensor

CONTEXT, TOPK, PAGE, HEADS = 4096, 512, 64, 64
FP8 = torch.float8_e4m3fn


@pytest.fixture(params=[80, 86, 89])
def older(request: pytest.FixtureRequest, kit: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kit, on a GPU without DeepGEMM, with the methods of the indexer replaced as `hooks` replaces them."""
    from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    fakes.on_cuda(monkeypatch.setattr, request.param)
    monkeypatch.setattr(kit, "_token_loc", lambda i, position, max_context_len: 256 + i * CONTEXT + position)
    monkeypatch.setattr(PagedIndexerMetadata, "__post_init__", indexer.plan_selection)
    monkeypatch.setattr(C4IndexerBackendMixin, "forward_c4_indexer", indexer.forward_c4_indexer)
    return kit


@define
class Step:
    """A step of SGLang's attention, and what its indexer is given.

    keys: bytes of the pool's pages of index keys, which the compressor of the step stores. calls: what SGLang's own
    methods were called with.
    """

    attention: Any
    batch: Any
    q: Tensor
    weights: Tensor
    keys: Tensor
    calls: list[str]

    @property
    def core(self) -> Any:
        return self.attention.forward_metadata.core_metadata

    @property
    def metadata(self) -> Any:
        return self.attention.forward_metadata.indexer_metadata

    @property
    def layer(self) -> Any:
        """SGLang's C4Indexer, as far as its caller and `_forward_prepare_normal` read it."""

        def compute_q(q_lora: Tensor, positions: Tensor, weights: Tensor, quantised: Any) -> tuple[Tensor, Tensor]:
            self.calls.append("query")
            assert len(q_lora) == len(positions) == len(self.q)
            return self.q, self.weights.unsqueeze(2)

        return SimpleNamespace(
            layer_id=0, compressor=None, compute_weights=lambda x, skip_scale: self.weights, compute_q=compute_q
        )

    def run(self, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Slots, and in prefill entry numbers, of each token."""
        slots, rows = self.core.c4_sparse_page_indices, len(self.q)
        x, q_lora = torch.zeros(rows, 8), torch.zeros(rows, 4)
        self.attention.forward_c4_indexer(x, q_lora, self.layer, self.batch, **options)
        # attention reads this tensor, and no other
        assert self.core.c4_sparse_page_indices is slots
        return slots, self.core.c4_sparse_raw_indices

    def scores(self, row: int) -> Tensor:
        """[E] float64 - of the entries that a token sees."""
        entries = torch.arange(int(self.metadata.compressed_seq_lens[row]))
        pages = self.metadata.page_table[row][entries // PAGE].long()
        codes = self.keys[:, : PAGE * 128].view(FP8).double().view(-1, PAGE, 128)[pages, entries % PAGE]
        scales = self.keys[:, PAGE * 128 :].contiguous().view(torch.float32).double()[pages, entries % PAGE]
        products = (self.q[row].double() @ codes.mT).clamp(min=0)
        return (self.weights[row].double()[:, None] * products).sum(0) * scales


def index_keys(pages: int, codes: Tensor, scales: Tensor) -> Tensor:
    """Pages of index keys: the codes of 64 keys, then their scales."""
    codes, scales = codes.view(pages, PAGE * 128), scales.view(pages, PAGE)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], 1)


@pytest.fixture
def step(older: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Step]:
    """Makes a step, by the arguments of `kit.case`. Values of queries and keys are such that bf16 holds their sums."""

    def made(mode: str, prefixes: tuple[int, ...], extends: tuple[int, ...] = (), *, context: int = CONTEXT) -> Step:
        kit_case = case("step", mode, prefixes, extends, compress_ratio=4)
        pages = 2 + len(prefixes) * CONTEXT // 256
        runner = runner_of(kit_case, (4,), max_context_len=context, swa_size=pages * 256)
        attention = older.ATTENTION_BACKENDS["dsv4"](runner)
        pool = runner.token_to_kv_pool
        assert serving.check(runner, {parts.INDEXER})[-1].startswith(f"indexer: scores and selection of {backend} (")
        codes = torch.randint(-2, 3, (pages, PAGE, 128)).float().to(FP8)
        keys = index_keys(pages, codes, 0.5 + torch.rand(pages, PAGE))
        buffers = pool._indexer_pool(4).index_k_with_scale_buffer
        buffers[0] = torch.full_like(keys, 0x7F)
        batch = older._make_forward_batch(kit_case, runner, max_context_len=CONTEXT, device="cpu")
        attention.init_forward_metadata(batch)
        tokens = kit_case.num_input_tokens
        q = (torch.randint(-1, 2, (tokens, HEADS, 128)) * (torch.rand(tokens, HEADS, 128) < 0.3)).float().to(FP8)
        weights = 2.0 ** torch.randint(-3, 1, (tokens, HEADS)) * (1 - 2 * (torch.rand(tokens, HEADS) < 0.25).float())
        result = Step(attention, batch, q, weights, keys, [])

        def store(**arguments: Any) -> None:
            result.calls.append("keys")
            buffers[0].copy_(keys)

        monkeypatch.setattr(attention, "forward_indexer_compressor", store)
        return result

    return made


def sglangs(step: Step) -> tuple[Tensor, Tensor]:
    """What SGLang's own torch functions select: slots and entry numbers, ascending."""
    from sglang.srt.layers.attention.dsv4.indexer import fp8_paged_mqa_logits_torch, topk_transform_pytorch_vectorized

    lens, table = step.metadata.compressed_seq_lens, step.metadata.page_table
    keys = step.keys.view(-1, PAGE, 1, 132)
    logits = fp8_paged_mqa_logits_torch(
        step.q.unsqueeze(1), keys, step.weights, lens, table, None, step.metadata.max_compressed_seq_len, False
    )
    slots, numbers = torch.empty(2, len(lens), TOPK, dtype=torch.int32)
    topk_transform_pytorch_vectorized(logits, lens, table, slots, PAGE, numbers)
    return slots.sort(1).values, numbers.sort(1).values


STEPS = [
    ("decode, long and short", "DECODE", (2300, 4000, 2), ()),
    ("a chunk of a prompt", "EXTEND", (3000,), (7,)),
    ("two prompts", "EXTEND", (2500, 0), (3, 9)),
    ("drafts are verified", "TARGET_VERIFY", (2100, 3500), (3, 3)),
]


@pytest.mark.parametrize(("name", "mode", "prefixes", "extends"), STEPS)
def test_selection_is_that_of_sglangs_own_torch_functions(
    step: Callable[..., Step], name: str, mode: str, prefixes: tuple[int, ...], extends: tuple[int, ...]
) -> None:
    made = step(mode, prefixes, extends)
    slots, numbers = made.run()

    assert made.calls == ["query", "keys"]
    assert made.metadata.max_compressed_seq_len > TOPK
    expected_slots, expected_numbers = sglangs(made)
    assert torch.equal(slots.sort(1).values, expected_slots)
    assert (numbers is not None) is (mode == "EXTEND")
    if numbers is not None:
        assert torch.equal(numbers.sort(1).values, expected_numbers)
        assert_same_columns(made, slots, numbers)


def assert_same_columns(step: Step, slots: Tensor, numbers: Tensor) -> None:
    """A slot and an entry number of the same column are one entry."""
    pages = step.metadata.page_table.gather(1, numbers.clamp(min=0).long() // PAGE)
    assert torch.equal(slots, torch.where(numbers < 0, -1, pages * PAGE + numbers % PAGE))


def test_scores_of_released_scales_are_exact_enough(step: Callable[..., Step]) -> None:
    """Scales amax / 448, as SGLang's compressor writes them, are no powers of two; all bits of queries are used."""
    made = step("DECODE", (2300, 4000))
    values = torch.randn(made.keys.shape[0], PAGE, 128)
    scales = values.abs().amax(2).clamp(min=1e-4) / 448
    made.keys.copy_(index_keys(len(values), (values / scales[..., None]).to(FP8), scales))
    made.q, made.weights = torch.randn(2, HEADS, 128).to(FP8), torch.randn(2, HEADS)
    slots, _ = made.run()

    for row in range(2):
        scores = made.scores(row)
        entries = torch.arange(len(scores))
        mine = torch.isin(made.metadata.page_table[row][entries // PAGE] * PAGE + entries % PAGE, slots[row])
        assert int(mine.sum()) == TOPK
        # of a near tie either entry may be taken
        assert scores[mine].min() >= scores[~mine].max() - 1e-5 * scores.abs().max()


def test_a_context_that_is_selected_whole_is_not_scored(
    step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = step("EXTEND", (0, 900), (9, 5), context=2048)
    monkeypatch.setattr(indexer._Selection, "keys_of", lambda *arguments: pytest.fail("scored"))
    slots, numbers = made.run()

    assert made.calls == ["query", "keys"]
    assert numbers is not None
    for row, n in enumerate(made.metadata.compressed_seq_lens.tolist()):
        assert numbers[row].tolist() == [*range(n), *[-1] * (TOPK - n)]
    assert_same_columns(made, slots, numbers)


def test_a_graphs_padding_selects_nothing(step: Callable[..., Step]) -> None:
    made = step("DECODE", (2300, 4000, 0, 0))
    slots, _ = made.run()

    assert (slots[2:] == -1).all()
    assert (slots[:2] >= 0).all()


def test_rows_after_the_tokens_of_the_metadata_are_not_read(step: Callable[..., Step]) -> None:
    made = step("DECODE", (2300, 4000))
    x, q_lora = torch.zeros(5, 8), torch.zeros(5, 4)
    made.attention.forward_c4_indexer(x, q_lora, made.layer, made.batch, q_lora_quant="of five rows")

    assert torch.equal(made.core.c4_sparse_page_indices.sort(1).values, sglangs(made)[0])


def test_queries_of_other_streams_are_taken(step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own method runs queries and compressor on its streams, in a captured graph."""
    made = step("DECODE", (2300,))

    def prepared(**arguments: Any) -> tuple[Tensor, Tensor]:
        made.calls.append(f"{arguments['alt_streams']} {arguments['q_lora_ready']}")
        made.attention.forward_indexer_compressor()
        return made.q, made.weights.unsqueeze(2)

    monkeypatch.setattr(made.attention, "_forward_prepare_multi_stream", prepared)
    slots, _ = made.run(enable_multi_stream=True, alt_streams="streams", q_lora_ready="event")

    assert made.calls == ["streams event", "keys"]
    assert torch.equal(slots.sort(1).values, sglangs(made)[0])


def test_a_step_is_copied_into_that_of_a_graph(step: Callable[..., Step]) -> None:
    """SGLang copies the metadata of a step into those that a captured graph reads, and then replays the graph."""
    captured, made = step("DECODE", (7, 9)), step("DECODE", (2300, 4000))
    captured.attention.forward_metadata.indexer_metadata.copy_(made.metadata)
    captured.q, captured.weights = made.q, made.weights
    captured.keys.copy_(made.keys)
    slots, _ = captured.run()

    assert torch.equal(slots.sort(1).values, sglangs(made)[0])


def test_entry_numbers_go_to_sglangs_capturer(step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.state_capturer import indexer_topk

    captured: list[tuple[int, Tensor]] = []
    capturer = SimpleNamespace(capture=lambda layer, numbers: captured.append((layer, numbers)))
    monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: capturer)
    made = step("DECODE", (2300, 4000))
    made.run()

    [(layer, numbers)] = captured
    assert layer == 0
    assert torch.equal(numbers.sort(1).values, sglangs(made)[1])


def test_an_idle_step_and_indices_from_outside(step: Callable[..., Step]) -> None:
    made = step("DECODE", (2300,))
    made.attention.debug_use_external_c4_sparse_indices = True
    slots, _ = made.run()
    assert made.calls == ["query", "keys"]
    assert (slots == -1).all()

    made.batch.forward_mode = SimpleNamespace(is_idle=lambda: True)
    made.run()
    assert made.calls == ["query", "keys"]
