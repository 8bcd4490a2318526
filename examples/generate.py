"""The DeepSeek-V4 of Hugging Face transformers on the paged caches of dsv4attn: the same tokens, in other bytes.

    python examples/generate.py
    python examples/generate.py --backend reference --kv-layout fp8_ds_mla --batch 4 --new-tokens 50

Makes a tiny model with random weights, without a network. Each prompt is generated alone by plain transformers, then
all of them in one batch, padded on the left, by the patched model. (In a batch of its own, transformers would let the
padding into compressed entries.) With fp32 rows no token differs, and the exit code is 1 if one does. With bf16 and
fp8 pages some differ, as expected: keys are rounded, the likeliest tokens of a random model are near each other, and
what follows a changed token changes too. The exit code is 1 then only if no token agrees.
"""

from __future__ import annotations

import inspect
import sys

import click
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from dsv4attn.errors import Dsv4AttnError
from dsv4attn.integrations.transformers import DeepseekV4PagedCache, patch, unpatch

SWA, C4A, C128A = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# transformers 5.24 renamed past_key_values to cache
CACHE = "cache" if "cache" in inspect.signature(DeepseekV4ForCausalLM.forward).parameters else "past_key_values"
SHORTEST, PER_PROMPT = 150, 37  # tokens of the first prompt, and how many more each further one has


def tiny_model() -> DeepseekV4ForCausalLM:
    """Make a model with one layer of each kind, and heads, ratios and window of the released models."""
    config = DeepseekV4Config(
        vocab_size=256,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=512,
        q_lora_rank=64,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=[SWA, C4A, C128A],
        mlp_layer_types=["moe"] * 3,
        o_groups=2,
        o_lora_rank=64,
        # as many as released models have: with few of them index scores are often exactly 0, and ties decide
        index_n_heads=64,
        index_topk=16,
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # these are constants in a fresh model
            if name.endswith(("sinks", "position_bias")):
                parameter.normal_()
            elif "proj" in name or name.endswith("lm_head.weight"):
                parameter.mul_(3)
    return model


def tensors(value: object, seen: dict[int, Tensor]) -> dict[int, Tensor]:
    """All tensors of a cache of transformers by address, keys that are values too once."""
    if isinstance(value, Tensor):
        seen[value.data_ptr()] = value
    elif isinstance(value, (list, dict)) or hasattr(value, "__dict__"):
        parts = value if isinstance(value, list) else (value if isinstance(value, dict) else vars(value)).values()
        for part in parts:
            tensors(part, seen)
    return seen


@click.command
@click.option("--backend", help="NAME, auto or decode=NAME,prefill=NAME; default: as DSV4ATTN_BACKEND says, or auto.")
@click.option("--kv-layout", type=click.Choice(["fp32", "bf16", "fp8_ds_mla"]), default="fp32", show_default=True)
@click.option("--batch", type=click.IntRange(1, 16), default=3, show_default=True, help="Prompts of several lengths.")
@click.option("--new-tokens", type=click.IntRange(1, 1000), default=30, show_default=True)
def main(backend: str | None, kv_layout: str, batch: int, new_tokens: int) -> None:
    """Generate with plain and with patched transformers; compare the tokens, and count the bytes of the caches."""
    torch.manual_seed(0)
    model, lengths = tiny_model(), [SHORTEST + PER_PROMPT * i for i in range(batch)]
    prompts = [torch.randint(1, 256, (1, n)) for n in lengths]
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    plain, plain_bytes = [], 0
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **{CACHE: cache}, **options)
        plain.append(output[0, prompt.shape[1] :].tolist())
        plain_bytes += sum(tensor.nbytes for tensor in tensors(cache.layers, {}).values())

    longest = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts])
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    try:
        handle = patch(model, backend, kv_layout=kv_layout, max_batch=batch, max_len=longest + new_tokens)
    except Dsv4AttnError as error:
        raise click.ClickException(str(error)) from error
    paged = DeepseekV4PagedCache(model)
    output = model.generate(ids, attention_mask=mask, **{CACHE: paged}, **options)
    patched, groups = output[:, longest:].tolist(), handle.kv_bytes()
    click.echo(
        f"backend {handle.backend}, {kv_layout}, {batch} prompts of {lengths} tokens, {new_tokens} new tokens each\n"
    )
    for number, (actual, expected) in enumerate(zip(patched, plain, strict=True)):
        click.echo(f"prompt {number}")
        for name, tokens in (("transformers", expected), ("dsv4attn", actual)):
            click.echo(f"  {name:<12} {' '.join(map(str, tokens))}")
    click.echo(f"\nbytes of the caches, for {sum(paged.lengths):,} tokens")
    click.echo(f"  transformers, DynamicCache  {plain_bytes:>12,}")
    click.echo(f"  dsv4attn, whole pages       {sum(groups.values()):>12,}")
    for name, size in groups.items():
        click.echo(f"    {name:<24}  {size:>12,}")
    unpatch(model)
    same = sum(
        a == b for actual, expected in zip(patched, plain, strict=True) for a, b in zip(actual, expected, strict=True)
    )
    total = batch * new_tokens
    rounded = 0 < same < total and kv_layout != "fp32"
    why = f"; others are expected: {kv_layout} pages round keys, and the model is random" if rounded else ""
    click.echo(f"\n{'ok' if rounded or same == total else 'DIFFERENT'}: {same} of {total} tokens agree{why}")
    sys.exit(not rounded and same != total)


if __name__ == "__main__":
    main()
