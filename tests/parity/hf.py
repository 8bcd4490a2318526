"""A tiny DeepSeek-V4 of transformers, and what its attention layers saw and made.

transformers is imported inside functions: this module can be read on Pythons that transformers has no build for.
Shapes are those of `core.model.geometry`; E compressed entries, J = keys of a single-shot run: T of the window, then E.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.model.geometry import LayerKind, ModelGeometry

WINDOW, HEADS, HEAD_DIM, ROPE_DIM, VOCABULARY = 8, 4, 32, 8, 64
RATIO = {LayerKind.SWA: 1, LayerKind.CSA: 4, LayerKind.HCA: 16}
KINDS = tuple(RATIO)
"""Layer i of the model is of kind i."""
LAYER_TYPES = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""What transformers calls these kinds."""
LONGEST = 71
FORMS = [
    {"decode_indices": decode, "prefill_indices": prefill, "prefill_keys": keys}
    for decode, prefill, keys in itertools.product(("dense", "ragged"), ("dense", "ragged"), ("gathered", "paged"))
]
"""Options of the reference: every form of keys and indices."""
each_form = pytest.mark.parametrize("forms", FORMS, ids=["-".join(forms.values()) for forms in FORMS])


@frozen(eq=False)
class Trace:
    """One attention layer over one sequence."""

    kind: LayerKind
    attention: Any
    """The module of transformers."""
    arguments: dict[str, Any]
    """What it was called with next to the hidden states, in the last call."""
    hidden: Tensor
    """[T, hidden] input."""
    output: Tensor
    """[T, hidden] output, after the output projection."""
    query: Tensor
    """[T, H, D] normalised and rotated."""
    keys: Tensor
    """[J, D] rotated keys of the last call: whatever of the window it still saw, then all E entries."""
    mask: Tensor
    """[T, J] additive mask of the last call."""
    weights: Tensor
    """[T, H, J] probabilities of the last call; what is missing to 1 went to the sink."""
    selected: Tensor
    """[T, E] bool: entries each query attends to."""

    @property
    def entries(self) -> Tensor:
        """[E, D] compressed keys: pooled, normed and rotated."""
        return self.keys[self.keys.shape[0] - self.selected.shape[1] :]

    def raw_q_kv(self) -> tuple[Tensor, Tensor]:
        """Queries [T, H, D] before their norm and keys [T, D] after theirs, both before RoPE."""
        a = self.attention
        q = a.q_b_proj(a.q_a_norm(a.q_a_proj(self.hidden)))
        return q.unflatten(-1, (HEADS, HEAD_DIM)), a.kv_norm(a.kv_proj(self.hidden))

    def topk_rows(self, width: int, generator: torch.Generator) -> Tensor:
        """Rows as an indexer leaves them: [T, width] int32 entry numbers, valid ones first, unordered, then -1."""
        rows = torch.full((self.selected.shape[0], width), -1, dtype=torch.int32)
        if self.kind is not LayerKind.CSA:
            return rows
        for row, chosen in zip(rows, self.selected, strict=True):
            entries = chosen.nonzero()[:, 0]
            row[: entries.shape[0]] = entries[torch.randperm(entries.shape[0], generator=generator)].int()
        return rows


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert not actual.isnan().any()
    return float((actual - expected).abs().max() / expected.abs().max())


def cache_name() -> str:
    """The argument for the cache of every model of the installed transformers, and the field of its outputs."""
    import transformers

    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    return "cache" if release >= (5, 24) else "past_key_values"


def passing(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model or to its `generate`."""
    return {cache_name(): cache}


def cache_of(output: Any) -> Any:
    """Return the cache that a model has put into its output."""
    return getattr(output, cache_name())


@contextmanager
def no_tie_decides() -> Iterator[None]:
    """Fail if equal scores stand on both sides of a selection of transformers, whose `topk` may take others than ours.

    This package takes the lowest entry numbers. Torch's `topk` on a CPU takes others below 64 times K entries.
    """
    topk, ties = Tensor.topk, 0

    def counted(scores: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        nonlocal ties
        if k < scores.shape[dim]:
            last, following = topk(scores, k + 1, dim).values.movedim(dim, 0)[k - 1 :]
            ties += int(((last == following) & last.isfinite()).sum())
        return topk(scores, k, dim, **options)

    with mock.patch.object(Tensor, "topk", counted):
        yield
    assert not ties, f"{ties} selections are decided by ties: compare with more index heads"


def config(**changes: Any) -> Any:
    """The smallest configuration in which no feature is trivial, or one with other fields."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    _, csa, hca = LAYER_TYPES
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "q_lora_rank": 24,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "layer_types": [*LAYER_TYPES],
        "compress_rates": {csa: RATIO[LayerKind.CSA], hca: RATIO[LayerKind.HCA]},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "sliding_window": WINDOW,
        "o_groups": 2,
        "o_lora_rank": 16,
        # fewer index heads give scores that are exactly zero, and ties whose winner depends on the shapes of a call
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 3,
        "hc_mult": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": yarn(original=256),
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    return DeepseekV4Config(**{**fields, **changes})


def yarn(*, original: int, factor: float = 16, beta_fast: float = 32, beta_slow: float = 1) -> dict[str, Any]:
    """Parameters of YaRN, as a configuration has them. original: positions that the model was trained with."""
    kind = {"rope_type": "yarn", "type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return {**kind, "beta_fast": beta_fast, "beta_slow": beta_slow}


def released(geometry: ModelGeometry) -> tuple[Any, Any]:
    """Return transformers' configuration of a model with this geometry, and its rotary embedding."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    scaling = geometry.compress_yarn
    assert scaling is not None
    configuration = DeepseekV4Config(
        hidden_size=geometry.hidden_size,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        qk_rope_head_dim=geometry.rope_dim,
        sliding_window=geometry.window,
        index_topk=geometry.index_topk,
        o_groups=geometry.o_groups,
        o_lora_rank=geometry.o_lora_rank,
        q_lora_rank=geometry.q_lora_rank,
        max_position_embeddings=geometry.max_position,
        compress_ratios=[0 if kind is LayerKind.SWA else ratio for kind, ratio in geometry.layers],
        rope_parameters=yarn(
            original=scaling.original_max_position,
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        ),
    )
    return configuration, DeepseekV4RotaryEmbedding(configuration)


@functools.cache
def model(seed: int) -> Any:
    """Return a seeded model in fp32. Whatever transformers initialises to a constant is random here too."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

    return seeded(lambda: DeepseekV4Model(config()), seed)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """Return what `make` makes, a model of transformers, with the parameters of `model`."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make().float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif name.endswith(("position_bias", "hc.base", "hc_base", "hc.scale", "hc_scale")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(4)
    return model.requires_grad_(requires_grad=False)


def prompt(seed: int, number: int = 0) -> Tensor:
    """[LONGEST] token ids; the padding id does not occur."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.randint(1, VOCABULARY, (LONGEST,), generator=generator)


@functools.cache
def trace(seed: int, kind: LayerKind, number: int = 0, length: int = LONGEST) -> Trace:
    """One layer of a single-shot run without a cache."""
    return run(model(seed), prompt(seed, number)[:length])[KINDS.index(kind)]


def run(model: Any, ids: Tensor, chunks: Sequence[int] = ()) -> list[Trace]:
    """Run a sequence through transformers, at once or through its own cache in chunks; one trace per layer.

    The attention function of its eager path is wrapped to see the queries, keys, mask and weights of each layer.
    """
    from transformers.cache_utils import DynamicCache

    calls: list[list[dict[str, Any]]] = [[] for _ in KINDS]

    def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
        calls[module.layer_idx][-1].update(hidden=args[0][0], arguments=kwargs, output=output[0][0])

    def attend(eager: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
            out, weights = eager(module, query, key, value, mask, **options)
            seen = {"query": query[0].transpose(0, 1), "keys": key[0, 0], "mask": mask[0, 0]}
            calls[module.layer_idx].append({**seen, "weights": weights[0].transpose(0, 1)})
            return out, weights

        return recorded

    handles = [layer.self_attn.register_forward_hook(see, with_kwargs=True) for layer in model.layers]
    cache = DynamicCache(config=model.config) if chunks else None
    with torch.no_grad(), eager_attention(attend), no_tie_decides():
        for part in ids.split(list(chunks) or [len(ids)]):
            model(input_ids=part[None], **passing(cache), use_cache=cache is not None)
    for handle in handles:
        handle.remove()
    return [_joined(model, kind, seen) for kind, seen in zip(KINDS, calls, strict=True)]


def _joined(model: Any, kind: LayerKind, calls: list[dict[str, Any]]) -> Trace:
    """One trace from the calls of one layer."""
    tokens = sum(call["hidden"].shape[0] for call in calls)
    selected = torch.zeros(tokens, tokens // RATIO[kind] if kind is not LayerKind.SWA else 0, dtype=torch.bool)
    done = 0
    for call in calls:
        n = call["hidden"].shape[0]
        entries = (done + n) // RATIO[kind] if kind is not LayerKind.SWA else 0
        visible = call["mask"][:, call["mask"].shape[1] - entries :] == 0
        selected[done : done + n, :entries] = visible
        done += n
    last: dict[str, Any] = {name: calls[-1][name] for name in ("arguments", "keys", "mask", "weights")}
    joined: dict[str, Any] = {name: torch.cat([call[name] for call in calls]) for name in ("hidden", "output", "query")}
    attention = model.layers[KINDS.index(kind)].self_attn
    return Trace(kind=kind, attention=attention, selected=selected, **last, **joined)


def with_keys(seen: Trace, keys: Tensor) -> Tensor:
    """[T, hidden] float64: the layer as transformers computes it, in float64, over other keys.

    seen: of a single-shot run. keys: [J, D].
    Everything else is the layer's own: projections, norms, rotations, mask, sink, output projection.
    """
    double = copy.deepcopy(seen.attention).double()
    # its entries are among the keys given, so nothing is left to compress, and no index score can round differently
    double.compressor = None
    tables = {
        name: tuple(part.double() for part in table) for name, table in seen.arguments["position_embeddings"].items()
    }

    def attend(eager: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
            stored_keys = keys.double()[None, None]
            return eager(module, query, stored_keys, stored_keys, seen.mask.double()[None, None], **options)

        return replaced

    with torch.no_grad(), eager_attention(attend):
        out = double(
            seen.hidden.double()[None],
            position_embeddings=tables,
            position_ids=seen.arguments["position_ids"],
            attention_mask=None,
        )
    result: Tensor = out[0][0]
    return result


def eager_attention(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Put another function into the place of transformers' eager attention, for the duration of a `with` block."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    return mock.patch.object(modeling, "eager_attention_forward", wrap(modeling.eager_attention_forward))
