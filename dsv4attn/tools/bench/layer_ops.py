"""Cases of the ops around attention: index logits, selection, compressor, hyper-connections, products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from attrs import evolve, frozen

from dsv4attn.core.model.geometry import ModelGeometry

_DECODES = (
    (1, 8192, 1),
    (1, 32768, 1),
    (1, 262144, 1),
    (8, 32768, 1),
    (64, 2048, 1),
    (64, 8192, 1),
    (64, 32768, 1),
    (64, 32768, 2),
    (256, 8192, 1),
)
"""(requests, index keys of each, tokens of each). There is a key for every four tokens of the context."""
_PROMPTS = ((2048, 2048), (2048, 8192), (2048, 32768), (256, 32768))
"""(tokens, index keys) of one request."""
_SMALL_DECODES = ((1, 1024, 1), (4, 1024, 1), (4, 1024, 2))
_LENGTHS = (8192, 32768, 131072, 262144)
"""Index keys of each request, in `selections`."""
_SMALL_LENGTHS = (2048,)
_BATCHES = (1, 8, 64)
_FLASH_TOPK = ModelGeometry.preset("deepseek-v4-flash").index_topk
_STEPS = ("save c4a", "save index", "save c128a", "store c4a", "store index", "store c128a", "query index")
_STREAMS = ("pre", "post", "post+pre", "head")


@frozen
class LayerOpCase:
    """An op around attention on one shape.

    kernel: index, select, compress, mhc or products.
    step: which step of them, or the form of its keys: "paged" or "gathered".
    label: name of the shape.
    requests: R - requests.
    tokens: tokens of each request in this step.
    keys: index keys of each request.
    topk: K - of select, entries that a token selects.
    hidden: d - hidden size. Of products: elements of a row of both factors.
    columns: of products, elements of a row of the result.
    seed: seed of the inputs.
    """

    series: ClassVar[str] = ""
    x: ClassVar[int] = 0
    records: ClassVar[str] = ""

    kernel: str
    step: str
    label: str
    requests: int = 1
    tokens: int = 1
    keys: int = 0
    hidden: int = 0
    columns: int = 0
    seed: int = 0
    topk: int = _FLASH_TOPK

    @property
    def name(self) -> str:
        """Unique in a run, and the same in every run."""
        return f"{self.kernel} {self.step} {self.label}"

    @property
    def count(self) -> int:
        """T - tokens of this step."""
        return self.requests * self.tokens


def layer_op_cases(kernels: Sequence[str], *, small: bool) -> list[LayerOpCase]:
    """Cases of some kernels. small: for a CPU."""
    makers = {"index": _index, "select": _select, "compress": _compress, "mhc": _mhc, "products": _products}
    return [case for kernel in kernels for case in makers[kernel](small=small)]


def selections(topks: Sequence[int], batches: Sequence[int] | None, tokens: int, *, small: bool) -> list[LayerOpCase]:
    """Selections at several lengths, prompts first.

    topks: numbers of selected entries, one for each layer. batches: requests of the decodes, or None for 1, 8 and 64.
    tokens: of the prompts. small: for a CPU.
    """
    lengths = _SMALL_LENGTHS if small else _LENGTHS
    shapes = [(1, keys, tokens) for keys in lengths]
    shapes += [(requests, keys, 1) for requests in batches or _BATCHES for keys in lengths]
    cases = (evolve(_index_inputs("select", "paged", *shape), topk=topk) for topk in topks for shape in shapes)
    # the shorter name is that of Flash, as in the list of `layer_op_cases`
    return [case if case.topk == _FLASH_TOPK else evolve(case, label=f"{case.label} K={case.topk}") for case in cases]


def _index(*, small: bool) -> Iterator[LayerOpCase]:
    for requests, keys, tokens in _SMALL_DECODES if small else _DECODES:
        yield _index_inputs("index", "paged", requests, keys, tokens)
    for tokens, keys in ((32, 1024),) if small else _PROMPTS:
        yield LayerOpCase("index", "gathered", f"t={tokens} k={keys}", 1, tokens, keys, seed=keys)


def _select(*, small: bool) -> Iterator[LayerOpCase]:
    for requests, keys, tokens in _SMALL_DECODES if small else _DECODES:
        yield _index_inputs("select", "paged", requests, keys, tokens)
    yield _index_inputs("select", "paged", 1, *((1024, 32) if small else (8192, 2048)))


def _index_inputs(kernel: str, step: str, requests: int, keys: int, tokens: int) -> LayerOpCase:
    return LayerOpCase(kernel, step, f"b={requests} t={tokens} k={keys}", requests, tokens, keys, seed=keys + requests)


def _compress(*, small: bool) -> Iterator[LayerOpCase]:
    for step in _STEPS:
        requests = 4 if small else 64
        yield LayerOpCase("compress", step, f"b={requests}", requests)
        for tokens in (256,) if small else (2048, 8192):
            yield LayerOpCase("compress", step, f"t={tokens}", 1, tokens)


def _mhc(*, small: bool) -> Iterator[LayerOpCase]:
    for hidden in (4096,) if small else (4096, 7168):
        for step in _STREAMS:
            for tokens in (8, 64) if small else (8, 64, 2048, 8192):
                yield LayerOpCase("mhc", step, f"t={tokens} d={hidden}", 1, tokens, hidden=hidden, seed=tokens)


def _products(*, small: bool) -> Iterator[LayerOpCase]:
    for model in ("flash",) if small else ("flash", "pro"):
        for step, (columns, depth) in _weights(ModelGeometry.preset(model)).items():
            for tokens in (16, 64) if small else (1, 16, 64, 2048, 8192):
                if not small or step == "wkv":
                    label = f"t={tokens} {model} {columns}x{depth}"
                    yield LayerOpCase("products", step, label, 1, tokens, hidden=depth, seed=tokens, columns=columns)


def _weights(model: ModelGeometry) -> dict[str, tuple[int, int]]:
    """Rows and columns of weights of a c4a layer. inputs: all that multiply hidden states, together."""
    hidden, latent, dim, index = model.hidden_size, model.q_lora_rank, model.head_dim, model.index_head_dim
    # keys and scores of the compressor, and of the indexer's, have two halves each
    inputs = latent + dim + 4 * dim + 4 * index + model.index_n_heads
    return {
        "inputs": (inputs, hidden),
        "wq_a": (latent, hidden),
        "wkv": (dim, hidden),
        "wq_b": (model.num_heads * dim, latent),
        "index-wq_b": (model.index_n_heads * index, latent),
        "wo_b": (hidden, model.o_groups * model.o_lora_rank),
    }
