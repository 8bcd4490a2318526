"""`examples/generate.py` finds the same tokens on pages, counts their bytes, and fails if fp32 pages differ."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.examples.built_wheels import ROOT

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="its model runs on the CPU")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("generate")


def test_the_tokens_agree_and_bytes_are_counted(example: ModuleType) -> None:
    done = CliRunner().invoke(example.main, ["--batch", "2", "--new-tokens", "8", "--backend", "reference"])

    assert done.exit_code == 0, done.output
    assert "backend reference, fp32, 2 prompts of [150, 187] tokens, 8 new tokens each" in done.output
    assert done.output.splitlines()[-1] == "ok: 16 of 16 tokens agree"
    sizes = {
        name: int(size.replace(",", ""))
        for name, size in re.findall(r"^ +(.+?)  +([\d,]+)$", done.output, re.MULTILINE)
    }
    groups = [sizes[name] for name in ("window", "compressed", "c4a_state", "c128a_state")]
    assert sizes["dsv4attn, whole pages"] == sum(groups) > 0
    # what transformers holds of 351 tokens: windows of three layers, entries, index keys, and parts of windows
    assert sizes["transformers, DynamicCache"] > 2 * 3 * 127 * 512 * 4


@pytest.mark.matrix
def test_differing_tokens_are_expected_where_pages_round(example: ModuleType) -> None:
    done = CliRunner().invoke(example.main, ["--backend", "reference", "--kv-layout", "fp8_ds_mla"])

    assert done.exit_code == 0, done.output
    last = done.output.splitlines()[-1]
    said = re.fullmatch(
        r"ok: (\d+) of 90 tokens agree; others are expected: fp8_ds_mla pages round keys, .* random", last
    )
    assert said, last
    assert 0 < int(said[1]) < 90


@pytest.mark.parametrize(("layout", "agreeing"), [("fp32", 8), ("fp32", 3), ("bf16", 3), ("bf16", 0), ("fp32", 0)])
def test_a_difference_is_said_and_fails_unless_pages_round(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, layout: str, agreeing: int
) -> None:
    generate = example.DeepseekV4ForCausalLM.generate
    plain: list[Any] = []

    def planted(model: Any, ids: Any, **options: Any) -> Any:
        if plain:
            tokens = plain[0].clone()
            tokens[:, ids.shape[1] + agreeing :] += 1
            return tokens
        plain.append(generate(model, ids, **options))
        return plain[0]

    monkeypatch.setattr(example.DeepseekV4ForCausalLM, "generate", planted)
    done = CliRunner().invoke(example.main, ["--batch", "1", "--new-tokens", "8", "--kv-layout", layout])

    fine = agreeing == 8 or (layout == "bf16" and agreeing)
    assert done.exit_code == (0 if fine else 1), done.output
    assert done.output.splitlines()[-1].startswith(f"{'ok' if fine else 'DIFFERENT'}: {agreeing} of 8 tokens agree")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("args", "said"), [("--backend=referencee", "did you mean 'reference'"), ("--kv-layout=fp8", "fp8_ds_mla")]
)
def test_a_bad_argument_is_said(example: ModuleType, args: str, said: str) -> None:
    done = CliRunner().invoke(example.main, [args])

    assert done.exit_code in (1, 2)
    assert said in done.output.splitlines()[-1]
