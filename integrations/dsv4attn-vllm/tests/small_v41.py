"""A small DeepSeek-V4.1 with random weights, and its answers in fp32, in plain torch over whole sequences.

Transformers has no DeepSeek-V4.1. `ReferenceV41` follows the written rules: no cache, no pages, no formats; dense
scores with masks. It shares with dsv4attn's tests the frequencies of RoPE, which are those of the float64 oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_model import shares_of_bugs
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from dsv4attn.testing.oracle import attention as oracle

RATIOS = (0, 2, 2, 1, 1, 1)
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_hidden_layers": len(RATIOS),
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    # after the layers of the model come those of a draft
    "compress_ratios": [*RATIOS, 0, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "index_head_dim": 128,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "hidden_act": "silu",
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 0,
}
"""A source and a reader of entries of each ratio, and an indexer that chooses among the candidates of another one."""

SIZES_V41 = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "num_attention_heads": 64,
    "q_lora_rank": 512,
    "o_groups": 8,
    "o_lora_rank": 128,
    "index_n_heads": 32,
    "index_topk": 512,
    "candidate_topk_blocks": 128,
    "candidate_block_size": 8,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 16384,
}
"""For engines on a GPU. Of the longer prompts some entries are not candidates."""

CHOSEN = 16.0
"""Bias of the experts of a layer. A choice by score alone changes with the last bit of a score."""
ROWS = 256
"""Queries that attend at once, for memory."""


def checkpoint_v41(folder: Path, sizes: Mapping[str, Any]) -> ReferenceV41:
    """Save a random model under DeepSeek's names of weights, in bf16, and return its reference in fp32.

    sizes: what `TEXT` lacks, and what differs from it.
    """
    text = {**TEXT, **sizes}
    model = ReferenceV41(text, random_weights(text))
    write_configuration(folder, sizes)
    stored = {name: value if is_fp32(name) else value.bfloat16() for name, value in model.weights.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return model


def write_configuration(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Write config.json of `checkpoint_v41` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    top = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**top, "text_config": {**TEXT, **sizes}}))


def v41_on_gpu(folder: Path) -> ReferenceV41:
    """The reference, on a GPU, of what `checkpoint_v41` has written: to draw the weights again takes longer."""
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    return ReferenceV41({**TEXT, **SIZES_V41}, weights).to("cuda")


def is_fp32(name: str) -> bool:
    """Whether checkpoints have a weight in fp32."""
    return ".hc_" in name or name.endswith(("attn_sink", "gate.bias")) or name.startswith("image_")


def shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, by its name in DeepSeek's checkpoints."""
    hidden, width, streams = text["hidden_size"], text["moe_intermediate_size"], text["hc_mult"]
    heads, dim, lora, index_dim = map(text.get, ("num_attention_heads", "head_dim", "q_lora_rank", "index_head_dim"))
    groups, rank, mixes = text["o_groups"], text["o_lora_rank"], streams * (streams + 2)
    out: dict[str, tuple[int, ...]] = {
        "embed.weight": (text["vocab_size"], hidden),
        "head.weight": (text["vocab_size"], hidden),
        "norm.weight": (hidden,),
        # of images, which vLLM asks for though this model reads none
        **{f"image_{name}": (hidden,) for name in ("start", "end", "newline")},
    }
    experts = [f"experts.{number}" for number in range(text["n_routed_experts"])]
    for i, ratio in enumerate(text["compress_ratios"][: text["num_hidden_layers"]]):
        layer: dict[str, tuple[int, ...]] = {
            "attn.wq_a.weight": (lora, hidden),
            "attn.q_norm.weight": (lora,),
            "attn.wq_b.weight": (heads * dim, lora),
            "attn.wkv.weight": (dim, hidden),
            "attn.kv_norm.weight": (dim,),
            "attn.attn_sink": (heads,),
            "attn.wo_a.weight": (groups * rank, heads * dim // groups),
            "attn.wo_b.weight": (hidden, groups * rank),
            "attn_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
            "ffn.gate.weight": (len(experts), hidden),
            "ffn.gate.bias": (len(experts),),
        }
        for part in ("attn", "ffn"):
            parts = {"fn": (mixes, streams * hidden), "base": (mixes,), "scale": (3,)}
            layer |= {f"hc_{part}_{name}": shape for name, shape in parts.items()}
        for expert in (*experts, "shared_experts"):
            layer |= {f"ffn.{expert}.{name}.weight": (width, hidden) for name in ("w1", "w3")}
            layer[f"ffn.{expert}.w2.weight"] = (hidden, width)
        if i in text["kv_source_layer_ids"]:
            names = ("wkv", "wgate") if ratio > 1 else ("wkv",)
            layer |= {f"attn.compressor.{name}.weight": (dim, hidden) for name in names}
            layer["attn.compressor.norm.weight"] = (dim,)
            layer["attn.indexer.wk.weight"] = (index_dim, dim)
            layer["attn.indexer.k_norm.weight"] = (index_dim,)
        if i in text["index_source_layer_ids"]:
            layer["attn.indexer.wq_b.weight"] = (text["index_n_heads"] * index_dim, lora)
            layer["attn.indexer.weights_proj.weight"] = (text["index_n_heads"], hidden)
        out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return out


def random_weights(text: Mapping[str, Any]) -> dict[str, Tensor]:
    """Random weights in fp32, which bf16 can represent. The bias of each layer chooses its experts."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in shapes(text).items():
        if name.endswith("gate.bias"):
            chosen = torch.randperm(*shape, generator=generator)[: text["num_experts_per_tok"]]
            weights[name] = torch.zeros(shape).index_fill(0, chosen, CHOSEN)
            continue
        random = torch.randn(shape, generator=generator)
        std = 1.0 if name.startswith("embed") else 0.5 if len(shape) == 1 else shape[-1] ** -0.5
        random = random * std
        weights[name] = (1 + random / 5 if "norm" in name else random).bfloat16().float()
    return weights


def in_8_bits(keys: Tensor) -> Tensor:
    """Keys [..., d] in e4m3, 32 values under a power of two, at least as large as their maximum / 448."""
    groups = keys.bfloat16().float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def in_4_bits(keys: Tensor) -> Tensor:
    """Keys [..., d] in e2m1, 16 values under a scale in e4m3: their maximum / 6."""
    groups = keys.bfloat16().float().unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    sizes = (groups / scales).abs()
    # apart: 0.5 below 2, 1 below 4, 2 up to 6
    apart = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return ((sizes / apart).round() * apart).clamp(max=6).copysign(groups).mul(scales).flatten(-2)


class SharedEntries(SimpleNamespace):
    """What layers of a sequence read from those before them.

    entries, index_keys: [E, d] after RoPE. ratio: tokens of an entry. chosen: [n, E] bool, by the last indexer.
    candidates: [n, E] bool, by the indexer that publishes blocks.
    """


class ReferenceV41:
    """Logits of whole sequences in fp32.

    text: the configuration. weights: by name, on one device. prompt, hit: see `replayed`.
    """

    OWN_RECORDS = "own_records"
    """Entry of the configuration that says whether keys are rounded, see `rounded`."""

    def __init__(self, text: Mapping[str, Any], weights: dict[str, Tensor], prompt: int = 0, hit: int = 0) -> None:
        self.text, self.weights, self.hit = text, weights, hit
        self.start = max(hit - text["sliding_window"], 0)
        self.earliest = max(prompt - text["sliding_window"], self.start)
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def to(self, device: str) -> ReferenceV41:
        """The same on a device."""
        return ReferenceV41(self.text, {name: value.to(device) for name, value in self.weights.items()})

    def rounded(self) -> ReferenceV41:
        """The same with keys as V4.1's own records hold them: windows in 8 bits a value, entries in 4.

        An engine with these records must not differ from this one by more than an engine with wider records differs
        from `self`: what the format costs is in the reference, and no bound is widened.
        """
        return ReferenceV41({**self.text, self.OWN_RECORDS: True}, self.weights)

    def stored(self, keys: Tensor, of_format: Callable[[Tensor], Tensor]) -> Tensor:
        """Keys as attention reads them."""
        return of_format(keys) if self.text.get(self.OWN_RECORDS) else keys

    def replayed(self, prompt: int, hit: int = 0) -> ReferenceV41:
        """The same with what vLLM leaves out of a prompt of this length that is prefilled in one chunk.

        Layers after the last source of entries run on the prompt's last window only, and see no window key before it.
        hit: how many tokens the prefix cache had. Their entries are those of the whole sequence. Window keys are not
        cached: those of the last window before the hit are computed again, without keys before them.
        """
        return ReferenceV41(self.text, self.weights, prompt, hit)

    def parameters(self) -> Iterator[Tensor]:
        """All weights."""
        yield from self.weights.values()

    def __call__(self, tokens: Tensor, logits_to_keep: int = 0) -> SimpleNamespace:
        """The logits [1, n, vocabulary] of tokens [1, n], or the last rows of them, as transformers returns them."""
        if self.hit:
            whole = ReferenceV41(self.text, self.weights)
            whole.streams(tokens[0])
            self.known = whole.known
        streams = self.streams(tokens[0])
        normed = self.norm(streams, self.weights["norm.weight"])[-logits_to_keep:]
        return SimpleNamespace(logits=linear(normed, self.weights["head.weight"])[None])

    def streams(self, tokens: Tensor) -> Tensor:
        """[n, hidden]: the residual streams after all layers, collapsed."""
        count = self.text["hc_mult"]
        streams = self.weights["embed.weight"][tokens][:, None].expand(-1, count, -1)
        # the first sublayer takes the first stream
        pre, shared = torch.eye(count, device=tokens.device)[:1].expand(len(tokens), -1), SharedEntries()
        for i in range(self.text["num_hidden_layers"]):
            for part, sublayer in (("attn", self.attention), ("ffn", self.experts)):
                next_pre, post, comb = self.mixes(streams, f"layers.{i}.hc_{part}_")
                x = torch.einsum("tn,tnd->td", pre, streams)
                y = sublayer(i, self.norm(x, self.weights[f"layers.{i}.{part}_norm.weight"]), shared)
                streams = post[..., None] * y[:, None] + torch.einsum("tij,tid->tjd", comb, streams)
                pre = next_pre
        return torch.einsum("tn,tnd->td", pre, streams)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.text["rms_norm_eps"]) * weight

    def mixes(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Pre [n, s], post [n, s] and comb [n, s, s] of streams [n, s, hidden]."""
        fn, base, scale = (self.weights[prefix + name] for name in ("fn", "base", "scale"))
        flat, count, eps = streams.flatten(1), streams.shape[1], self.text["hc_eps"]
        products = linear(flat, fn) * torch.rsqrt(flat.square().mean(1, keepdim=True) + self.text["rms_norm_eps"])
        sizes = [count, count, count**2]
        parts = zip(products.split(sizes, dim=1), scale, base.split(sizes), strict=True)
        pre, post, comb = (product * factor + bias for product, factor, bias in parts)
        comb = comb.unflatten(1, (count, count)).softmax(2) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.text["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre.sigmoid() + eps, 2 * post.sigmoid(), comb

    def experts(self, i: int, x: Tensor, _: SharedEntries) -> Tensor:
        """Routed and shared experts of x [n, hidden]."""
        prefix, limit = f"layers.{i}.ffn.", self.text["swiglu_limit"]

        def expert(name: str) -> Tensor:
            gate, up, down = (self.weights[f"{prefix}{name}.{part}.weight"] for part in ("w1", "w3", "w2"))
            gated = silu(linear(x, gate).clamp(max=limit)) * linear(x, up).clamp(-limit, limit)
            return linear(gated, down)

        scores = softplus(linear(x, self.weights[prefix + "gate.weight"])).sqrt()
        [chosen] = self.weights[prefix + "gate.bias"].nonzero(as_tuple=True)
        factors = scores[:, chosen]
        factors = factors / factors.sum(1, keepdim=True) * self.text["routed_scaling_factor"]
        routed = sum(factors[:, [k]] * expert(f"experts.{number}") for k, number in enumerate(chosen.tolist()))
        return routed + expert("shared_experts")

    def rope(self, x: Tensor, positions: Tensor, i: int, *, back: bool = False) -> Tensor:
        """X [n, ..., d] with neighbouring pairs of its last 64 columns rotated to these positions, or back."""
        dim, scaling, compressed = self.text["qk_rope_head_dim"], self.text["rope_scaling"], self.ratio(i)
        yarn = oracle.Yarn(scaling["factor"], scaling["original_max_position_embeddings"], 32.0, 1.0)
        theta = self.text["compress_rope_theta"] if compressed else self.text["rope_theta"]
        frequencies = torch.from_numpy(oracle.rope_inv_freq(dim, theta, yarn if compressed else None))
        angles = positions.float()[:, None] * frequencies.to(x.device)
        turn = torch.polar(torch.ones_like(angles), -angles if back else angles)
        turn = turn.view(len(x), *[1] * (x.dim() - 2), -1)
        kept, rotated = x.split([x.shape[-1] - dim, dim], dim=-1)
        pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat([kept, torch.view_as_real(pairs).flatten(-2)], dim=-1)

    def ratio(self, i: int) -> int:
        """Tokens of an entry that a layer reads, or 0."""
        return int(self.text["compress_ratios"][i])

    def attention(self, i: int, x: Tensor, shared: SharedEntries) -> Tensor:
        """Attention of x [n, hidden], with its projections."""
        prefix = f"layers.{i}.attn."
        w = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        at, dim = torch.arange(len(x), device=x.device), self.text["head_dim"]
        qr = self.norm(linear(x, w["wq_a.weight"]), w["q_norm.weight"])
        q = self.rope(linear(qr, w["wq_b.weight"]).unflatten(1, (-1, dim)), at, i)
        keys = self.rope(self.norm(linear(x, w["wkv.weight"]), w["kv_norm.weight"]), at, i)
        keys = self.stored(keys, in_8_bits)
        distance = at[:, None] - at
        visible = (distance >= 0) & (distance < self.text["sliding_window"])
        is_replayed = i > max(self.text["kv_source_layer_ids"])
        visible = visible & (at >= (self.earliest if is_replayed else self.start))
        if i in self.text["kv_source_layer_ids"]:
            self.compress(i, x, w, shared)
        if i in self.text["index_source_layer_ids"]:
            self.select(i, x, qr, w, shared)
        if self.ratio(i):
            keys, visible = torch.cat([keys, shared.entries]), torch.cat([visible, shared.chosen], dim=1)
        outs, sink = [], w["attn_sink"]
        for q_rows, visible_rows in zip(q.split(ROWS), visible.split(ROWS), strict=True):
            scores = torch.einsum("thd,kd->thk", q_rows, keys) * dim**-0.5
            scores = scores.masked_fill(~visible_rows[:, None], -torch.inf)
            with_sink = torch.cat([scores, sink.view(1, -1, 1).expand(len(scores), -1, -1)], dim=2)
            outs.append(with_sink.softmax(2)[..., :-1] @ keys)
        out = self.rope(torch.cat(outs), at, i, back=True)
        groups = self.text["o_groups"]
        grouped, wo_a = out.flatten(1).unflatten(1, (groups, -1)), w["wo_a.weight"].unflatten(0, (groups, -1))
        return linear(torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1), w["wo_b.weight"])

    def compress(self, i: int, x: Tensor, w: Mapping[str, Tensor], shared: SharedEntries) -> None:
        """Make entries and index keys of whole groups of tokens."""
        ratio = shared.ratio = self.ratio(i)
        rows = x[: len(x) // ratio * ratio]
        kv = linear(rows, w["compressor.wkv.weight"]).unflatten(0, (-1, ratio))
        if ratio > 1:
            gate = linear(rows, w["compressor.wgate.weight"]).unflatten(0, (-1, ratio))
            kv = kv * gate.softmax(1)
        latents = self.norm(kv.sum(1), w["compressor.norm.weight"])
        at = torch.arange(len(latents), device=x.device) * ratio
        shared.entries = self.stored(self.rope(latents, at, i), in_4_bits)
        index_keys = self.norm(linear(latents, w["indexer.wk.weight"]), w["indexer.k_norm.weight"])
        shared.index_keys = self.rope(index_keys, at, i)
        if i in self.known and self.hit:
            count = self.hit // ratio
            for rows, cached in zip((shared.entries, shared.index_keys), self.known[i], strict=True):
                rows[:count] = cached[:count]
        self.known[i] = shared.entries, shared.index_keys

    def select(self, i: int, x: Tensor, qr: Tensor, w: Mapping[str, Tensor], shared: SharedEntries) -> None:
        """Choose the entries with the largest scores, of those that a token sees."""
        at = torch.arange(len(x), device=x.device)
        q = self.rope(linear(qr, w["indexer.wq_b.weight"]).unflatten(1, (-1, self.text["index_head_dim"])), at, i)
        factors, scores = linear(x, w["indexer.weights_proj.weight"]), []
        for q_rows, factor_rows in zip(q.split(ROWS), factors.split(ROWS), strict=True):
            products = torch.einsum("thd,kd->thk", q_rows, shared.index_keys).relu()
            scores.append(torch.einsum("thk,th->tk", products, factor_rows))
        count = len(shared.index_keys)
        visible = torch.arange(count, device=x.device) < ((at + 1) // shared.ratio)[:, None]
        if i > self.text["candidate_source_layer_id"]:
            visible = visible & shared.candidates
        ranked = torch.cat(scores).masked_fill(~visible, -torch.inf)
        if i == self.text["candidate_source_layer_id"]:
            shared.candidates = self.candidates(ranked, (at + 1) // shared.ratio)
        best = ranked.topk(min(self.text["index_topk"], count), dim=1)[1]
        shared.chosen = torch.zeros_like(visible).scatter(1, best, True) & visible

    def candidates(self, scores: Tensor, counts: Tensor) -> Tensor:
        """[n, E]: whether an entry is in one of the best blocks, that of the last visible entry among them."""
        size, blocks = self.text["candidate_block_size"], self.text["candidate_topk_blocks"]
        missing = -scores.shape[1] % size
        filled = torch.cat([scores, scores.new_full((len(scores), missing), -torch.inf)], dim=1)
        best = filled.unflatten(1, (-1, size)).amax(2)
        last = ((counts - 1).clamp(min=0) // size)[:, None]
        best = best.scatter(1, last.clamp(max=best.shape[1] - 1), torch.inf)
        chosen = best.topk(min(blocks, best.shape[1]), dim=1)[1]
        inside = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
        return inside.repeat_interleave(size, dim=1)[:, : scores.shape[1]]


# ---------------------------------------------------------------- bugs of which the answers must have nothing


def _text(**changed: Any) -> Callable[[ReferenceV41], ReferenceV41]:
    return lambda model: ReferenceV41({**model.text, **changed}, model.weights)


def _weight(end: str, factor: float) -> Callable[[ReferenceV41], ReferenceV41]:
    """Multiply the weights whose names end so."""

    def broken(model: ReferenceV41) -> ReferenceV41:
        weights = {name: value * factor if name.endswith(end) else value for name, value in model.weights.items()}
        return ReferenceV41(model.text, weights)

    return broken


BUGS_V41: dict[str, Callable[[ReferenceV41], ReferenceV41]] = {
    "other sinks": _weight("attn_sink", -4),
    "a window of 127": _text(sliding_window=127),
    "a window of 129": _text(sliding_window=129),
    "the worst entries": _weight("indexer.weights_proj.weight", -1),
    "no candidates": _text(candidate_source_layer_id=len(RATIOS)),
    "another theta": _text(compress_rope_theta=40000),
    "no keys at ratio 2": _weight("layers.1.attn.compressor.norm.weight", 0),
    "no keys at ratio 1": _weight("layers.3.attn.compressor.norm.weight", 0),
    "groups without a gate": _weight("compressor.wgate.weight", 0),
}


def error_shares_v41(
    model: ReferenceV41, expected: Tensor, prompts: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float]]:
    """`error_shares` of small_model.py, for the bugs of V4.1."""
    broken = ((name, bug(model)) for name, bug in BUGS_V41.items())
    return shares_of_bugs(broken, expected, prompts, answers)
