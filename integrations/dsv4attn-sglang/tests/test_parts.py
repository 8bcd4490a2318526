"""Which parts around attention run on dsv4attn on which GPU, and what is refused there."""

from __future__ import annotations

from inspect import getsource
from types import SimpleNamespace
from typing import Any

import fakes
import pytest
from dsv4attn_sglang import parts, serving
from dsv4attn_sglang.guard import RefusedError
from kit import case, runner_of
from test_plugin import run


@pytest.mark.parametrize(
    ("sm", "deep_gemm", "expected"),
    [
        (80, True, {"indexer", "gather"}),
        (86, True, {"indexer", "gather"}),
        (89, True, {"indexer"}),
        (90, True, set()),
        (90, False, {"indexer"}),
    ],
)
def test_auto_takes_the_steps_that_sglang_cannot_run(
    kit: Any, monkeypatch: pytest.MonkeyPatch, sm: int, deep_gemm: bool, expected: set[str]
) -> None:
    fakes.on_cuda(monkeypatch.setattr, sm, deep_gemm=deep_gemm)

    assert parts.chosen(parts.Device.here()) == expected


@pytest.mark.parametrize(
    "variable",
    ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "SGLANG_OPT_USE_AITER_INDEXER", "SGLANG_OPT_USE_TILELANG_INDEXER"],
)
def test_scores_that_the_user_chose_in_sglang_stay(kit: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    fakes.on_cuda(monkeypatch.setattr, 89)
    monkeypatch.setenv(variable, "1")
    assert parts.chosen(parts.Device.here()) == frozenset()

    monkeypatch.setenv(parts.VARIABLE, "none")
    assert parts.chosen(parts.Device.here()) == frozenset()


@pytest.mark.parametrize(
    ("word", "expected"),
    [("indexer", {"indexer"}), ("gather", {"gather"}), ("all", {"indexer", "gather"}), ("none", set())],
)
def test_steps_may_be_asked_for_elsewhere(
    kit: Any, monkeypatch: pytest.MonkeyPatch, word: str, expected: set[str]
) -> None:
    monkeypatch.setenv(parts.VARIABLE, word)

    assert parts.chosen(parts.Device.here()) == expected


REFUSED = [
    (
        "none",
        80,
        "expected indexer,gather, which SGLang's own kernels cannot do on this GPU, got none -> leave DSV4ATTN",
    ),
    ("gather", 86, "expected indexer,gather, which SGLang's own kernels cannot do on this GPU, got gather -> leave"),
    ("none", 89, "expected indexer, which SGLang's own kernels cannot do on this GPU, got none -> leave DSV4ATTN"),
    ("indexer", 0, "expected none on this device, got indexer -> leave DSV4ATTN"),
    ("indexr", 80, "expected auto, all, none, or some of indexer, gather, got 'indexr' -> write indexer"),
]


@pytest.mark.parametrize(("word", "sm", "said"), REFUSED)
def test_words_that_cannot_be_served_are_refused(
    monkeypatch: pytest.MonkeyPatch, word: str, sm: int, said: str
) -> None:
    monkeypatch.setenv(parts.VARIABLE, word)

    with pytest.raises(RefusedError, match=f"environment variable DSV4ATTN_SGLANG_PARTS: {said}"):
        parts.chosen(parts.Device(sm, deep_gemm=False))


@pytest.mark.parametrize("sm", [80, 86, 89])
@pytest.mark.parametrize(
    ("ratios", "change", "said"),
    [
        ((1, 2), {}, r"model: expected layers of ratios 0, 4 and 128, .*, got ratios \[1, 2\] -> serve DeepSeek-V4"),
        ((0, 4), {"hisparse_coordinator": 1}, "--enable-hisparse: expected off, for indexer on dsv4attn, got on ->"),
    ],
)
def test_models_and_options_that_the_indexer_does_not_serve_are_refused(
    kit: Any, monkeypatch: pytest.MonkeyPatch, sm: int, ratios: tuple[int, ...], change: dict[str, Any], said: str
) -> None:
    """By auto: such a GPU is not served unless all that it needs is."""
    fakes.on_cuda(monkeypatch.setattr, sm)
    runner = runner_of(case("decode", "DECODE", (5,)), ratios)
    vars(runner).update(change)
    runner.model_config.attention_arch = None
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    with pytest.raises(RefusedError, match=said):
        attention_backend_setup.build_attention_backends(model_runner=runner)


def test_index_keys_of_four_bits_are_refused(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.runtime_context

    runner = runner_of(case("decode", "DECODE", (5,)))
    kernel = SimpleNamespace(enable_deepseek_v4_fp4_indexer=True)
    monkeypatch.setattr(sglang.srt.runtime_context, "get_exec", lambda: SimpleNamespace(kernel=kernel))

    with pytest.raises(
        RefusedError, match="--enable-deepseek-v4-fp4-indexer: expected off, for indexer on dsv4attn, got"
    ):
        parts.check(runner)


@pytest.mark.parametrize(
    ("sm", "experts", "dequantised", "is_served"),
    [
        (80, "auto", False, False),
        (86, "marlin", False, False),
        (89, "flashinfer_mxfp4", False, False),
        (80, "humming", False, True),
        (89, "humming", False, True),
        # to fp8, which Triton multiplies from sm_89 on
        (86, "auto", True, False),
        (89, "auto", True, True),
        (90, "auto", False, True),
    ],
)
def test_experts_in_mxfp4_that_would_not_run_are_refused(
    kit: Any, monkeypatch: pytest.MonkeyPatch, sm: int, experts: str, dequantised: bool, is_served: bool
) -> None:
    from sglang.srt.layers.moe import utils

    fakes.on_cuda(monkeypatch.setattr, sm)
    monkeypatch.setattr(utils, "get_moe_runner_backend", lambda: utils.MoeRunnerBackend(experts))
    monkeypatch.setenv("SGLANG_DSV4_FP4_DEQUANT", str(int(dequantised)))
    runner = runner_of(case("decode", "DECODE", (5,)))
    runner.model_config.is_fp4_experts = True
    if is_served:
        serving._check_experts(runner)
        return
    words = (
        f"--moe-runner-backend: expected humming on sm_{sm}, .*, got {experts} -> start SGLang with --moe-runner-back"
    )
    with pytest.raises(RefusedError, match=words):
        serving.check(runner)


def test_sglangs_marlin_refuses_experts_in_mxfp4_there(kit: Any) -> None:
    """The reason of that refusal. If this fails, SGLang serves such GPUs with more than Humming."""
    from sglang.srt.layers.quantization.mxfp4_marlin_moe import Mxfp4MarlinMoEMethod

    assert "MXFP4 Marlin requires SM90 or SM120." in getsource(Mxfp4MarlinMoEMethod.process_weights_after_loading)


@pytest.mark.parametrize("sm", [80, 89])
def test_a_process_on_such_a_gpu_replaces_what_it_lacks_and_says_so(sm: int) -> None:
    result = run(f"older_gpu({sm})", DSV4ATTN_BACKEND="reference")

    said = [line for line in result["lines"] if line.startswith("dsv4attn-sglang")]
    assert "dsv4attn-sglang: indexer: scores and selection of reference (DSV4ATTN_SGLANG_PARTS)" in said
    gathers = "dsv4attn-sglang: gather: keys of prompts by reference (DSV4ATTN_SGLANG_PARTS)"
    assert (gathers in said) is (sm < 89)
    [replaced] = [line for line in said if line.startswith("dsv4attn-sglang: replaced ")]
    targets = [
        "sglang.srt.layers.attention.dsv4.metadata.PagedIndexerMetadata.__post_init__",
        "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin.forward_c4_indexer",
        "sglang.kernels.ops.attention.dsv4.dequant_k_cache.dequantize_k_cache_paged_dsv4",
    ]
    functions = ["forward_c4_indexer", "plan_selection", "dequantize_k_cache_paged_dsv4"]
    count = 3 if sm < 89 else 2
    assert replaced.split(", ")[2:] == targets[:count]
    assert result["replaced"] == functions[:count]
