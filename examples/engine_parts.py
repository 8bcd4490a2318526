"""Small stand-ins for the parts of an engine that `engine.py` needs: requests, scheduler, model, backend choice."""

from __future__ import annotations

import click
import torch
from attrs import define, field
from torch import Tensor
from torch.nn.functional import linear

from dsv4attn import (
    Backend,
    BlockAllocator,
    Dsv4AttnError,
    LayerGeometry,
    Limits,
    ModelGeometry,
    Problem,
    explain,
    select_backend,
)

HIDDEN, VOCAB = 256, 1000


@define(eq=False)
class Request:
    """A request of the engine.

    name: for the output.
    tokens: prompt and generated tokens.
    use_prefixes: whether it may use pages of the prefix cache.
    tables: pages by kind of cache.
    done: tokens in the caches.
    shared: tokens of these on pages of the prefix cache.
    logits: [VOCAB] fp32 of each generated token.
    """

    name: str
    tokens: list[int]
    use_prefixes: bool = True
    tables: tuple[list[int], ...] = field(factory=lambda: ([], []))
    done: int = 0
    shared: int = 0
    logits: list[Tensor] = field(factory=list)

    def describe(self, n: int) -> str:
        """Describe the next n tokens."""
        last = self.done + n - 1
        return f"{self.name} prefills {self.done}..{last}" if n > 1 else f"{self.name} decodes {last}"


class Scheduler:
    """Continuous batching over paged caches.

    page: tokens of a page of each kind of cache, the largest last. blocks: number of pages of each kind.
    Prefixes end at multiples of the largest page; their pages stay until the end.
    """

    def __init__(self, limits: Limits, page: tuple[int, ...], blocks: tuple[int, ...], new_tokens: int) -> None:
        """Start with every page free."""
        self.limits, self.page, self.new_tokens = limits, page, new_tokens
        self.pools = [BlockAllocator(n, shuffle_seed=0) for n in blocks]
        self.running: list[Request] = []
        self.prefixes: dict[tuple[int, ...], tuple[list[int], ...]] = {}

    def add(self, request: Request) -> None:
        """Admit a request, with the pages of its longest cached prefix. At least one token remains to be computed."""
        page = self.page[-1]
        for end in range((len(request.tokens) - 1) // page * page, 0, -page):
            if request.use_prefixes and (pages := self.prefixes.get(tuple(request.tokens[:end]))):
                request.tables, request.done, request.shared = tuple([*table] for table in pages), end, end
                break
        self.running.append(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """(request, tokens) of the next step: every decode first, then prompts as far as the budget goes."""
        work, budget = [], self.limits.max_num_batched_tokens
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.done):
            if n := min(len(request.tokens) - request.done, budget):
                work.append((request, n))
                budget -= n
                for table, pool, size in zip(request.tables, self.pools, self.page, strict=True):
                    table.extend(pool.allocate(-(-(request.done + n) // size) - len(table)))
        return sorted(work, key=lambda part: part[1] > self.limits.decode_threshold)

    def step_done(self, work: list[tuple[Request, int]], logits: Tensor) -> None:
        """Take the logits [R, VOCAB] of each request's last token: the likeliest is the next one."""
        for (request, n), row in zip(work, logits, strict=True):
            request.done += n
            if request.done < len(request.tokens):
                continue
            if request.use_prefixes and not request.logits:
                self._remember(request)
            request.tokens.append(int(row.argmax()))
            request.logits.append(row)
            if len(request.logits) == self.new_tokens:
                self.running.remove(request)
                for pool, table, size in zip(self.pools, request.tables, self.page, strict=True):
                    pool.free(table[request.shared // size :])

    def _remember(self, request: Request) -> None:
        """Give the full pages of a prompt to the prefix cache, unless it has the prefix already."""
        for end in range(self.page[-1], len(request.tokens) + 1, self.page[-1]):
            pages = tuple(table[: end // size] for table, size in zip(request.tables, self.page, strict=True))
            if self.prefixes.setdefault(tuple(request.tokens[:end]), pages) is pages:
                request.shared = end


def chosen_backend(model: ModelGeometry, limits: Limits, name: str | None, device: torch.device) -> Backend:
    """The backend of all layers: the named one, else that of DSV4ATTN_BACKEND, dsv4attn.toml or selection.

    Prints its name and why it was chosen. A backend that cannot be loaded is an error of one line.
    """
    phases_of: dict[str, list[str]] = {}
    problems = [
        Problem.of(model, kind, phase, max_model_len=limits.max_model_len)
        for phase in ("decode", "prefill")
        for kind in model.kinds
    ]
    try:
        for phase in ("decode", "prefill"):
            selection = explain([p for p in problems if p.phase == phase], backend=name, device=device)
            if selection.chosen is None:
                why = [line for candidate in selection.trace if candidate.asked for line in candidate.lines]
                raise click.ClickException("; ".join([selection.verdict, *why]))
            phases_of.setdefault(f"{selection.verdict}  ({selection.request.source})", []).append(phase)
        backend = select_backend(*problems, backend=name, device=device)
    except Dsv4AttnError as error:
        raise click.ClickException(str(error)) from None
    for text, phases in phases_of.items():
        click.echo(f"{' and '.join(phases)} on {text}")
    return backend


def norm(x: Tensor) -> Tensor:
    """RMS norm without a weight."""
    return x * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)


class StandIn:
    """A layer of the model around the attention: random projections, an untrained compressor and indexer.

    T tokens, H heads, D head dim, G groups of heads; everything bf16 unless it says otherwise.
    """

    def __init__(self, model: ModelGeometry, device: torch.device) -> None:
        """Draw the weights, each [out, in] as `linear` takes it. wo_a: [G * rank, H / G * D], as `o_proj` takes it."""
        heads, rank, self.head_dim = (
            model.num_heads * model.head_dim,
            model.o_groups * model.o_lora_rank,
            model.head_dim,
        )
        keys = (model.head_dim, HIDDEN)
        shapes = (heads, HIDDEN), keys, keys, (HIDDEN, rank), (rank, heads // model.o_groups)
        drawn = [torch.randn(*shape).mul_(HIDDEN**-0.5).bfloat16().to(device) for shape in shapes]
        self.wq, self.wkv, self.w_entry, self.wo_b, self.wo_a = drawn

    def q_and_kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, H, D] and keys [T, D] of x [T, HIDDEN], neither rotated yet."""
        return linear(norm(x), self.wq).unflatten(-1, (-1, self.head_dim)), norm(linear(norm(x), self.wkv))

    def entries(self, x: Tensor) -> Tensor:
        """Compressed entry [T, D] that each token would complete. A real compressor pools 4 or 128 tokens."""
        return norm(linear(norm(x), self.w_entry))

    def topk(self, positions: Tensor, layer: LayerGeometry) -> Tensor:
        """[T, K] int32: numbers of the newest entries that each token sees, -1 for none. A real indexer scores them."""
        visible = (positions[:, None] + 1) // layer.compress_ratio
        newest = visible - 1 - torch.arange(layer.topk, device=positions.device)
        return newest.clamp(min=-1).int()

    def output(self, x: Tensor, z: Tensor) -> Tensor:
        """Project the attention's z [T, G, rank] back and add it to x."""
        return x + norm(linear(z.flatten(1), self.wo_b))
