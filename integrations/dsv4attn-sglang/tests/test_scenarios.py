"""The scenarios of on_gpu/ on a CPU: SGLang takes their options, and what it returns is read as it is meant."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakes
import pytest
import torch
from on_gpu.scenarios import (
    DEFAULTS,
    SCENARIOS,
    TENSOR_PARALLEL,
    V41_OWN_RECORDS,
    V41_SCENARIOS,
    Scenario,
    write_for_sglang,
)
from on_gpu.worker import VOCABULARY, answer_of
from small_model import SIZES, configuration, draft_settings, figures, write_as_released
from small_v41 import SIZES_V41, write_configuration

from dsv4attn import ModelGeometry, load_backend
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.integrations.engines import SGLANG
from dsv4attn.tools.cli.compile import bounds_of, rank_of


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Folders of checkpoints without weights."""
    folders = {name: tmp_path / name for name in ("plain", "mtp", "dspark")}
    for name, folder in folders.items():
        configuration(SIZES).save_pretrained(folder)
        write_as_released(folder)
        write_for_sglang(folder)
        if name != "plain":
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | draft_settings(name, layers=3)))
    write_configuration(tmp_path / "v41", SIZES_V41)
    return {**folders, "v41": tmp_path / "v41"}


@pytest.mark.filterwarnings("ignore")  # of modules that SGLang imports for a GPU
def test_sglang_resolves_the_options_and_keeps_what_is_asked_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.on_cuda(monkeypatch.setattr)
    known = {"is_available": True, "device_count": 1, "get_device_name": "GPU", "get_device_capability": (9, 0)}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for scenario in [*SCENARIOS, TENSOR_PARALLEL, *V41_SCENARIOS, V41_OWN_RECORDS]:
        with monkeypatch.context() as patch:
            for name, value in scenario.environment.items():
                patch.setenv(name, value)
            check_options(scenario, str(folders[scenario.checkpoint]))


def check_options(scenario: Scenario, folder: str) -> None:
    """SGLang resolves the options of a scenario as they are meant."""
    from sglang.srt.server_args import ServerArgs

    options = scenario.input(folder, by_sglang=False)["options"] | {"device": "cuda"}
    arguments = ServerArgs(**options)
    arguments.resolve_once()
    arguments.check_server_args()
    resolved = arguments.resolved_dict()
    assert resolved["attention_backend"] == "dsv4"
    assert resolved["page_size"] == 256
    for name in (DEFAULTS | scenario.options).keys() - {"log_level"}:
        assert resolved[name] == options[name], (scenario, name)
    graphs = resolved["cuda_graph_config"]
    decode = "disabled" if "disable_cuda_graph" in options else options.get("cuda_graph_backend_decode", "full")
    assert graphs["decode"]["backend"] == decode, scenario
    assert graphs["prefill"]["backend"] == options.get("cuda_graph_backend_prefill", "disabled"), scenario


@pytest.mark.parametrize("of_prompts", [True, False])
def test_what_sglang_returns_is_read_as_log_probabilities(*, of_prompts: bool) -> None:
    prompt, tokens = 4, [7, 1, 3]
    expected = torch.randn(prompt - 1 + len(tokens), VOCABULARY)
    for place, token in enumerate(tokens, prompt - 1):
        expected[place, token] = 9
    rows: list[Any] = [[(row[t].item(), t, None) for t in torch.randperm(VOCABULARY).tolist()] for row in expected]
    meta = {
        "input_top_logprobs": [None, *rows[: prompt - 1]],
        # a draft more than was asked for
        "output_top_logprobs": [*rows[prompt - 1 :], rows[0]],
        "cached_tokens": 2,
        "num_retractions": 1,
    }
    answer = answer_of({"output_ids": tokens, "meta_info": meta}, of_prompts=of_prompts)

    assert (answer["tokens"], answer["cached"], answer["retractions"], answer["drafts"]) == (tokens, 2, 1, 0)
    seen = expected if of_prompts else expected[-len(tokens) :]
    assert figures([seen], [answer]) == {"rms": 0, "gap": 0, "equal": 1}
    other = {**answer, "tokens": [7, 2, 3]}
    found = figures([seen], [other])
    assert found["equal"] == pytest.approx(2 / 3)
    assert found["gap"] == pytest.approx(9 - expected[prompt, 2].item())
    with pytest.raises(AssertionError):
        # an answer with a row too few is not compared
        figures([seen[1:]], [answer])


@pytest.mark.parametrize("ranks", [1, 8])
def test_kernels_of_attention_and_selection_are_compiled_before_the_first_request(
    ranks: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4attn_sglang import serving
    from sglang.srt.utils.hf_transformers_utils import get_config

    pool = SimpleNamespace(
        present_ratios=(4, 128),
        kv_layout=SimpleNamespace(value="v4"),
        compressed_kv_layout=lambda _: SimpleNamespace(value="v4"),
        get_swa_key_page_size=lambda: 256,
    )
    text_config = get_config(str(folders["mtp"]), trust_remote_code=False)
    config = SimpleNamespace(hf_text_config=text_config, context_len=4096, num_attention_heads=64)
    monkeypatch.setattr(serving, "_ranks", lambda: ranks)
    runner = SimpleNamespace(token_to_kv_pool=pool, model_config=config)

    model, kernels = ModelGeometry.from_config(str(folders["mtp"])), {}
    for parts in (("indexer", "gather"), ()):
        bounds = serving.bounds_of(runner, parts)
        assert [layer.kind.value for layer in bounds.layers] == ["swa", "c4a", "c128a"]
        assert (bounds.layers[1].topk, bounds.layers[0].num_heads, bounds.swa.record_bytes) == (512, 64, 584)
        for name, target in (("triton", "sm_80"), ("sm90", "sm_90")):
            backend, device = load_backend(name), DeviceFacts.named(target)
            variants = backend.kernel_variants(bounds, device)
            # `dsv4attn compile --engine sglang --model FOLDER --tensor-parallel RANKS --max-model-len 4096`
            image = bounds_of(rank_of(model, ranks, SGLANG), "e4m3fn", 4096)
            assert {*variants} <= {*backend.kernel_variants(image, device)}
        kernels[parts] = {variant.name for variant in variants}
    of_selection = {"choose_groups_kernel", "score_groups_kernel", "score_kernel", "choose_kernel"}
    assert kernels["indexer", "gather"] - kernels[()] == of_selection
    assert {"attention", "window_kernel", "gather_kernel"} <= kernels[()]
