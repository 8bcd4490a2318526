"""What dsv4attn does not serve is refused while SGLang loads the model, by name and with what to change."""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsv4attn_sglang import hooks, serving
from dsv4attn_sglang.guard import RefusedError
from kit import case, runner_of

from dsv4attn.errors import ConfigError, NoBackendError
from dsv4attn.integrations import engines


@pytest.fixture
def build(kit: Any) -> Callable[..., Any]:
    """Builds attention as SGLang does when it has loaded a model."""

    def built(change: Callable[[Any], None] = lambda runner: None) -> Any:
        from sglang.srt.model_executor.model_runner_components import attention_backend_setup

        runner = runner_of(case("decode", "DECODE", (5,)))
        runner.model_config.attention_arch = None
        change(runner)
        return attention_backend_setup.build_attention_backends(model_runner=runner)

    return built


def test_a_model_that_is_served_says_who_runs_each_kind_of_call(kit: Any, backend: str) -> None:
    lines = serving.check(runner_of(case("decode", "DECODE", (5,))))

    said = f"heads: {backend}: asked for by name (environment variable DSV4ATTN_BACKEND)"
    # rows of the c128a table are as wide as the context, 512 tokens, in steps of 64
    assert lines == [f"decode, 64 {said}; swa, c4a, c128a", f"prefill, 64 {said}; up to 640 of the gathered rows"]


def test_an_untested_sglang_is_refused_by_name_with_the_variable_that_overrides(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "version", lambda name: "0.5.99")
    words = (
        r"^dsv4attn-sglang: version of SGLang: expected 0\.5\.23, got 0\.5\.99 -> install sglang==0\.5\.23, "
        r"set DSV4ATTN_SGLANG_ANY_VERSION=1 to try this version, "
        r"or set DSV4ATTN_SGLANG=0 to run SGLang's own attention$"
    )
    with pytest.raises(RefusedError, match=words):
        build()
    monkeypatch.setenv("DSV4ATTN_SGLANG_ANY_VERSION", "1")
    assert build().attn_backend
    monkeypatch.setattr(engines, "version", lambda name: "0.5.23+cu130")
    monkeypatch.delenv("DSV4ATTN_SGLANG_ANY_VERSION")
    assert build().attn_backend


def test_a_model_of_another_kind_is_none_of_our_business(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "version", lambda name: "0.5.99")

    def other(runner: Any) -> None:
        runner.prefill_attention_backend_str = runner.decode_attention_backend_str = "torch_native"

    assert type(build(other).attn_backend).__name__ == "TorchNativeAttnBackend"


@pytest.mark.parametrize(("prefill", "decode"), [("flashinfer", "dsv4"), ("dsv4", "trtllm_mla")])
def test_another_backend_for_one_phase_is_refused(
    build: Any, monkeypatch: pytest.MonkeyPatch, prefill: str, decode: str
) -> None:
    """SGLang's `HybridAttnBackend` of the two is never built."""

    def mixed(runner: Any) -> None:
        runner.prefill_attention_backend_str, runner.decode_attention_backend_str = prefill, decode

    words = (
        rf"^dsv4attn-sglang: --prefill-attention-backend and --decode-attention-backend: expected dsv4 for both: .*, "
        rf"got {prefill} and {decode} -> start SGLang with --attention-backend dsv4 and without these two, or set DSV4"
    )
    with pytest.raises(RefusedError, match=words):
        build(mixed)


def test_sglangs_hybrid_backend_lacks_what_the_layers_call(kit: Any) -> None:
    """The reason of that refusal."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    for name in ("store_cache", "forward_core_compressor", "get_swa_out_cache_loc"):
        assert hasattr(DeepseekV4AttnBackend, name)
        assert not hasattr(HybridAttnBackend, name)
    assert not hasattr(HybridAttnBackend, "__getattr__")


def test_a_backend_that_cannot_run_here_is_an_error_with_all_reasons(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without the interpreter a CPU has no Triton
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("DSV4ATTN_BACKEND", "decode=reference,prefill=sm90")
    with pytest.raises(NoBackendError, match=r"'sm90' cannot run this call\n +call +prefill (?s:.*)sm90 +INTERPRETER"):
        build()
    monkeypatch.setenv("DSV4ATTN_BACKEND", "refrnce")
    with pytest.raises(NoBackendError, match="did you mean 'reference'"):
        build()
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    monkeypatch.setenv("DSV4ATTN_BAKEND", "reference")
    with pytest.raises(ConfigError, match="DSV4ATTN_BAKEND: unknown variable"):
        build()


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("window v41, c4 v41, c128 v41", {"kv_layout": "v41"}),
    ("c4 v41_fp4", {"compressed": "v41_fp4"}),
    ("uniform fp8 rows", {"uniform_fp8": True}),
    ("one pool of plain rows", {"_unified_kv": True}),
]


@pytest.mark.parametrize(("actual", "changes"), LAYOUTS)
def test_caches_of_other_records_are_refused(build: Any, actual: str, changes: dict[str, Any]) -> None:
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    def other(runner: Any) -> None:
        pool, options = runner.token_to_kv_pool, dict(changes)
        if "kv_layout" in options:
            options["kv_layout"] = KVLayout(options["kv_layout"])
        if "compressed" in options:
            layout = KVLayout(options.pop("compressed"))
            pool.compressed_kv_layout = lambda ratio: layout if ratio == 4 else KVLayout.V4
        vars(pool).update(options)

    with pytest.raises(
        RefusedError, match=rf"KV cache: expected .*584-byte records, got {actual} -> set SGLANG_DSV4_KV"
    ):
        build(other)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("--dsv4-attn-backend: expected flashmla, got trtllm -> start SGLang with", {"dsv4_attn_backend": "trtllm"}),
    ("--dsv4-prefill-backend: expected flashmla_sparse, got", {"dsv4_prefill_backend": "flashmla_sparse_q8"}),
]


@pytest.mark.parametrize(("said", "options"), OPTIONS)
def test_options_that_lead_past_flash_mlas_functions_are_refused(
    kit: Any, monkeypatch: pytest.MonkeyPatch, said: str, options: dict[str, Any]
) -> None:
    import sglang.srt.runtime_context

    kernel = SimpleNamespace(**{"dsv4_attn_backend": "flashmla", "dsv4_prefill_backend": "auto", **options})
    runner = runner_of(case("decode", "DECODE", (5,)))
    monkeypatch.setattr(sglang.srt.runtime_context, "get_exec", lambda: SimpleNamespace(kernel=kernel))

    with pytest.raises(RefusedError, match=said):
        serving.check(runner)


@pytest.mark.parametrize(("hip", "actual"), [(False, "npu"), (True, "ROCm")])
def test_devices_on_which_sglang_has_no_flash_mla_are_refused(
    kit: Any, monkeypatch: pytest.MonkeyPatch, hip: bool, actual: str
) -> None:
    import sglang.srt.utils

    monkeypatch.setattr(sglang.srt.utils, "is_cuda", lambda: False)
    monkeypatch.setattr(sglang.srt.utils, "is_hip", lambda: hip)

    with pytest.raises(
        RefusedError, match=rf"^dsv4attn-sglang: device: expected a GPU of NVIDIA or Intel: .*, got {actual} "
    ):
        serving.targets("npu")


def test_a_refusal_comes_before_sglang_builds_anything(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    def built(*args: object, **kwargs: object) -> None:
        raise AssertionError

    with monkeypatch.context() as refused:
        refused.setattr(DeepseekV4AttnBackend, "__init__", built)
        refused.setattr(engines, "version", lambda name: "0.5.99")
        with pytest.raises(RefusedError):
            build()
    assert torch.is_tensor(build().attn_backend.req_to_token)
    assert hooks.ATTENTION in hooks._registered
