"""Requests that vLLM's own engine serves with DeepSeek-V4.1 on a CPU, against a reference in fp32.

served_v41.py says what is faked, small_v41.py what the reference is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from processes import execute, run
from small_model import logprobs, prompt_of, rms
from small_v41 import checkpoint_v41, error_shares_v41, in_4_bits, in_8_bits
from test_engine_run import check_answers
from v41 import since_0_33

from dsv4attn import KVCacheLayout
from dsv4attn.core.cache.key_codecs import dequantize_keys, quantize_keys

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 16,
    "index_topk": 16,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 8,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 4096,
}
TOKENS = 6
CHUNK = 256
TOGETHER, ALONE = [prompt_of(length) for length in (5, 300, 131)], prompt_of(250, 7)
"""The second one of these prompts is prefilled in two chunks. The other prompt is longer than a window."""


def serve(folder: Path, backend: str, rounds: list[Any], **options: Any) -> tuple[list[list[dict[str, Any]]], str]:
    """The answers in each round of an engine in a process of its own, and its log."""
    limits = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": CHUNK, "max_logprobs": 256}
    given = {"model": str(folder), "out": str(folder / "answers.pt"), "backend": backend, "rounds": rounds}
    given |= {"tokens": TOKENS, "num_gpu_blocks_override": 200, **limits, **options}
    log = run(folder, execute, {"code": "import served_v41\nserved_v41.main(**given)", "given": given})
    return torch.load(folder / "answers.pt")[0], log


@since_0_33
def test_requests_are_answered_as_by_the_reference(tmp_path: Path) -> None:
    """Three rounds: ragged prompts, one in chunks; a prompt alone; and one with pages from the prefix cache.

    Where log-probabilities of a prompt are not asked for, vLLM leaves out what `ReferenceV41.replayed` says.
    """
    model, backend = checkpoint_v41(tmp_path, SIZES), "reference"

    (together, [alone], [again]), log = serve(tmp_path, backend, [TOGETHER, [ALONE], [TOGETHER[1]]])

    assert re.findall(r"dsv4attn-vllm: (\w+) runs on (\w+):", log) == [("decode", backend), ("prefill", backend)]
    assert "DeepSeek-V4.1 attention of vLLM 0.33.0 runs on dsv4attn" in log
    assert "Using V2 Model Runner" in log
    expected = logprobs(model, TOGETHER, together)
    check_answers(expected, together)
    for name, (size, share) in error_shares_v41(model, torch.cat(expected), TOGETHER, together).items():
        assert size > 0.018, name  # 0.01998 on one processor, above 0.02 on another
        assert abs(share) < 0.2, (name, share)
    assert (alone["cached"], again["cached"]) == (0, 256)
    for prompt, answer in ((ALONE, alone), (TOGETHER[1], again)):
        replayed = model.replayed(len(prompt), answer["cached"])
        check_answers(logprobs(replayed, [prompt], [answer], last=TOKENS), [answer])


@since_0_33
def test_requests_are_answered_from_v41s_own_records(tmp_path: Path) -> None:
    """Held against a reference whose keys are rounded as these records round them, by the bounds of wider records.

    The engine is nearer to it than to the reference with keys in fp32, so entries do have 4 bits.
    """
    model = checkpoint_v41(tmp_path, SIZES)

    [together], log = serve(tmp_path, "reference", [TOGETHER], kv_cache_dtype="nvfp4_ds_mla")

    assert "a token has 528 bytes in window caches, an entry 288 in compressed ones" in log
    expected = logprobs(model.rounded(), TOGETHER, together)
    check_answers(expected, together)
    answered = torch.cat([answer["logprobs"] for answer in together])
    error, of_fp32 = (rms(answered - torch.cat(rows)) for rows in (expected, logprobs(model, TOGETHER, together)))
    assert error < 0.9 * of_fp32


def test_keys_are_rounded_as_the_records_round_them() -> None:
    """Bit for bit, ties among them: some values are whole halves of a power of two."""
    keys = torch.cat([torch.randn(64, 512), torch.randint(-12, 13, (64, 512)) / 2])
    for of_format, layout in ((in_8_bits, KVCacheLayout.v41_fp8()), (in_4_bits, KVCacheLayout.v41_fp4())):
        assert torch.equal(of_format(keys), dequantize_keys(*quantize_keys(keys, layout), layout))
