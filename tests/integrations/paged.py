"""Models of transformers for the tests of `patch`, and their calls on pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.parity import hf


def large_config() -> Any:
    """Heads, window, ratios, RoPE and index heads of the released models; four layers with few channels between."""
    swa, c4a, c128a = hf.LAYER_TYPES
    return hf.config(
        vocab_size=256,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=64,
        layer_types=[swa, c4a, c128a, c4a],
        compress_rates={c4a: 4, c128a: 128},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        sliding_window=128,
        o_lora_rank=64,
        index_head_dim=128,
        index_topk=32,
        max_position_embeddings=1_048_576,
        rope_parameters=hf.yarn(original=65536),
    )


def new_model(config: Any = None, seed: int = 0, **options: Any) -> Any:
    """A seeded model in fp32 that a test may change. config: by default that of `hf`. options: of `from_config`."""
    from transformers import AutoModelForCausalLM

    config = hf.config() if config is None else config
    return hf.seeded(lambda: AutoModelForCausalLM.from_config(config, **options), seed)


@functools.cache
def causal_model(*, large: bool = False, seed: int = 0) -> Any:
    """A model in fp32, seeded; tests leave it as it is."""
    return new_model(large_config() if large else hf.config(), seed)


def call(model: Any, ids: Tensor, **arguments: Any) -> Any:
    """The output of a model for token ids, without gradients."""
    with torch.no_grad():
        return model(input_ids=ids, **arguments)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """[N, T, vocabulary] logits of a call without a cache. Fails where a tie decides a selection of transformers."""
    with nullcontext() if hasattr(model, "dsv4attn") else hf.no_tie_decides():
        logits: Tensor = call(model, ids, use_cache=False).logits
    return logits


def filled(model: Any, *sequences: Tensor) -> Any:
    """A cache of these sequences [1, n] of one length."""
    return hf.cache_of(call(model, torch.cat(sequences), use_cache=True))


@contextmanager
def patched(model: Any, backend: Any = "reference", **options: Any) -> Iterator[Any]:
    """The handle of a model that is patched within the block."""
    from dsv4attn.integrations.transformers import patch, unpatch

    handle = patch(model, backend, **{"kv_layout": "fp32", "max_batch": 4, "max_len": 256, **options})
    try:
        yield handle
    finally:
        unpatch(model)


def ids_of(model: Any, length: int, number: int = 0) -> Tensor:
    """[1, length] random token ids without the padding id."""
    generator = torch.Generator().manual_seed(77 + number)
    return torch.randint(1, model.config.vocab_size, (1, length), generator=generator)


def left_padded(*prompts: Tensor) -> dict[str, Tensor]:
    """Prompts [1, n] as a batch, padded on the left with 0, and its mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts])
    seen = torch.arange(longest) >= longest - torch.tensor([prompt.shape[1] for prompt in prompts])[:, None]
    return {"input_ids": ids, "attention_mask": seen.long()}


def chunked(model: Any, ids: Tensor, chunks: Sequence[int], cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """[N, T, vocabulary] logits of calls with one cache, made by the first call unless it is given."""
    done, parts = 0 if cache is None else cache.get_seq_length(), []
    for n, part in zip(chunks, ids.split(list(chunks), 1), strict=True):
        done += n
        arguments = {} if mask is None else {"attention_mask": mask[:, :done]}
        with torch.no_grad():
            out = model(input_ids=part, **hf.passing(cache), use_cache=True, **arguments)
        cache = hf.cache_of(out)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def generated(model: Any, tokens: int, **inputs: Any) -> Tensor:
    """The new tokens [N, tokens] of a greedy search."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **inputs}
    output: Tensor = model.generate(max_new_tokens=tokens, **options)
    return output[:, inputs["input_ids"].shape[1] :]
