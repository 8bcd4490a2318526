"""Benchmark cases: kernels by name, and their shapes in the released models."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.errors import UnknownNameError

if TYPE_CHECKING:
    from dsv4attn.tools.bench.layer_ops import LayerOpCase

KERNELS = ("decode", "prefill", "prefill-rows", "insert", "quantize", "gather")
"""decode, prefill: attention on fp8 pages. prefill-rows: on bf16 rows gathered before. insert: q-norm, RoPE, quantise
and store. quantize: quantise and store. gather: pages to bf16 rows."""
ATTENTION = KERNELS[:3]
PAIRED = ("decode", "prefill", "step")
"""Kernels that read the pages of a layer's caches."""
PAIRS = ("584/584", "528/528", "528/288")
"""Bytes of the records of a V4.1 layer's window and compressed cache. Times are compared with those of the first."""
LAYER_OPS = ("index", "select", "compress", "mhc", "products")
"""Ops around attention. index: logits of index keys. select: scores and selection. compress: states, entries and
index queries. mhc: hyper-connections. products: products with the weights of deterministic layers."""
MEASUREMENTS = (*KERNELS, "step", "scaling", "host", "layer", *LAYER_OPS)
"""step: whole steps of `forward_mqa`. scaling: lines along which one size grows. host: core's time on the host.
layer: whole layers, the price of deterministic ones, and the share of each step of a layer."""
PEER_NAMES = (
    "flash_mla",
    "vllm",
    "flashinfer",
    "deep_gemm",
    "flashinfer_topk",
    "sglang_topk",
    "vllm_topk",
    "vllm_auto_topk",
)
"""Names of `peers.PEERS`, which imports torch."""
HEAD_DIM, ROPE_DIM, WINDOW, WINDOW_PAGE = 512, 64, 128, 64


@frozen
class Preset:
    """A kind of layer of a model.

    name: unique among presets.
    kind: kind of the layer.
    heads: query heads.
    ratio: compression ratio; 1 for window-only layers.
    topk: most compressed keys of a token.
    page: records in a page of the compressed cache.
    model: name of the model, as `ModelGeometry.preset` takes it.
    """

    name: str
    kind: LayerKind
    heads: int
    ratio: int = 1
    topk: int = 0
    page: int = WINDOW_PAGE
    model: str = "flash"

    @property
    def layer(self) -> LayerGeometry:
        """Geometry of the layer, as a backend gets it."""
        topk = self.topk if self.kind is LayerKind.CSA else 0
        sizes = self.heads, HEAD_DIM, Rope(ROPE_DIM, 10000.0), WINDOW, topk  # 448 + 64 dims
        return LayerGeometry(self.kind, self.ratio, *sizes, overlap=not self.v41, q_norm=not self.v41)

    @property
    def v41(self) -> bool:
        """Whether it is a layer of DeepSeek-V4.1, whose queries have no norm and whose caches have several records."""
        return self.model.startswith("v4.1")

    @property
    def selects(self) -> bool:
        """Whether it selects entries, with an indexer of the heads that V4 has."""
        return self.kind is LayerKind.CSA and not self.v41

    @property
    def columns(self) -> int:
        """Width of the compressed indices; tables of c128a layers are a multiple of 128 wide."""
        return -(-self.topk // 128) * 128 if self.kind is LayerKind.HCA else self.topk

    @property
    def context(self) -> int:
        """Tokens of a request with more entries than a token selects; on c128a layers with just as many."""
        return self.ratio * (max(2048, 2 * self.topk) if self.kind is LayerKind.CSA else self.topk) or 8192


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("flash_c4", LayerKind.CSA, 64, 4, 512),
        Preset("pro_c4", LayerKind.CSA, 128, 4, 1024, model="pro"),
        Preset("flash_c128", LayerKind.HCA, 64, 128, 1024, 2),
        Preset("pro_c128", LayerKind.HCA, 128, 128, 1024, 2, "pro"),
        Preset("flash_swa", LayerKind.SWA, 64),
        Preset("v41_r1", LayerKind.CSA, 64, 1, 512, model="v4.1-flash"),
        Preset("v41_r2", LayerKind.CSA, 64, 2, 512, model="v4.1-flash"),
    )
}
CONTEXT_CASES = tuple(name for name, preset in PRESETS.items() if preset.kind is not LayerKind.SWA and not preset.v41)
"""Names of the layers whose entries ranks can divide."""


@frozen
class KernelCase:
    """One kernel on one shape.

    kernel: name of the kernel.
    preset: kind of layer.
    label: name of the shape.
    requests: (tokens before, tokens now) of each request.
    series: name of the scaling line, or "".
    x: size that grows along that line.
    seed: seed of the inputs.
    records: one of PAIRS, or "" for the 584-byte records of V4's layers.
    """

    kernel: str
    preset: Preset
    label: str
    requests: tuple[tuple[int, int], ...]
    series: str = ""
    x: int = 0
    seed: int = 0
    records: str = ""

    @property
    def name(self) -> str:
        """Unique in a run, and the same in every run."""
        return " ".join(filter(None, (self.series or self.kernel, self.preset.name, self.label, self.records)))

    @property
    def tokens(self) -> int:
        """Tokens of this step."""
        return sum(query for _, query in self.requests)


@frozen
class CaseSizes:
    """Default sizes for a kind of machine.

    batches: requests of the decodes.
    tokens: query tokens of the prefills.
    inserted: rows of insert and quantize.
    records: records of each of the eight requests that are gathered.
    rounds: rounds to take the median of.
    heads: query heads of a rank, one case for each; empty: those of the layers.
    drafts: draft tokens of each request of a decode.
    """

    batches: tuple[int, ...]
    tokens: int
    inserted: int
    records: int
    rounds: int
    heads: tuple[int, ...] = ()
    drafts: int = 0


def sizes(device: str) -> CaseSizes:
    """Default sizes on a kind of torch device. On a CPU the run takes less than a minute."""
    if device == "cpu":
        return CaseSizes((1, 4), 32, 128, 256, 5)
    return CaseSizes((8, 64, 256), 2048, 8192, 8192, 20)


def named(kind: str, text: str | None, allowed: Sequence[str], default: Sequence[str]) -> list[str]:
    """The parts of a comma-separated list, each of which must be in `allowed`. Raises UnknownNameError."""
    names = [name.strip() for name in text.split(",") if name.strip()] if text else list(default)
    for name in names:
        if name not in allowed:
            raise UnknownNameError(kind, name, allowed)
    return list(dict.fromkeys(names))


def cases_of(kernels: Sequence[str], presets: Sequence[str], size: CaseSizes) -> list[KernelCase]:
    """Cases of some kernels, without repeated ones."""
    layers = [PRESETS[name] for name in presets]
    if size.heads:
        layers = [of_rank(layer, heads) for layer in layers for heads in size.heads]
    cases = (case for kernel in kernels for case in _of_kernel(kernel, layers, size))
    paired = ((case, PAIRS if case.preset.v41 and case.kernel in PAIRED else ("",)) for case in cases)
    return [evolve(case, records=pair) for case, pairs in paired for pair in pairs]


def together(cases: Sequence[KernelCase | LayerOpCase]) -> list[list[KernelCase | LayerOpCase]]:
    """Cases that are timed in turn: those that differ in their records alone."""

    def without_records(case: KernelCase | LayerOpCase) -> object:
        return evolve(case, records="") if isinstance(case, KernelCase) else case

    return [list(group) for _, group in groupby(cases, without_records)]


def _of_kernel(kernel: str, presets: Sequence[Preset], size: CaseSizes) -> Iterator[KernelCase]:
    # insert depends on heads and the norm alone, rows on the keys of a token, gather on the page size, quantize on
    # nothing
    facets: dict[str, Callable[[Preset], object]] = {
        "insert": attrgetter("heads", "v41"),
        "prefill-rows": attrgetter("kind", "heads", "columns"),
        "quantize": type,
        "gather": attrgetter("page"),
    }
    facet = facets.get(kernel, attrgetter("name"))
    first: dict[object, Preset] = {}
    for preset in presets:
        first.setdefault(facet(preset), preset)
    for preset in first.values():
        if kernel == "decode":
            for batch in size.batches:
                label = f"b={batch} drafts={size.drafts}" if size.drafts else f"b={batch}"
                yield KernelCase(kernel, preset, label, decodes(preset, batch, drafts=size.drafts), seed=batch)
        elif kernel in ATTENTION:
            yield KernelCase(kernel, preset, f"t={size.tokens}", ((max(preset.context - size.tokens, 0), size.tokens),))
        elif kernel == "step":
            batch = size.batches[-1]
            yield KernelCase(kernel, preset, f"b={batch}", decodes(preset, batch), seed=batch)
            yield KernelCase(kernel, preset, f"t={size.tokens} n=0", ((0, size.tokens),))
            yield KernelCase(kernel, preset, f"t={size.tokens} n=8192", ((8192, size.tokens),))
        elif kernel == "gather":
            yield KernelCase(kernel, preset, f"8x{size.records}", ((size.records, 0),) * 8)
        else:
            yield KernelCase(kernel, preset, f"t={size.inserted}", ((0, size.inserted),))


def host_cases() -> list[KernelCase]:
    """One decode token on each kind of layer of a model."""
    presets = [PRESETS[name] for name in ("flash_swa", "flash_c4", "flash_c128")]
    return [KernelCase("host", preset, "b=1", ((8192, 1),)) for preset in presets]


def decodes(preset: Preset, batch: int, context: int | None = None, *, drafts: int = 0) -> tuple[tuple[int, int], ...]:
    """Requests of one token and its drafts.

    All have one length; on c128a layers, whose keys depend on it, any length up to that.
    """
    longest, count = preset.context if context is None else context, 1 + drafts
    if preset.kind is LayerKind.HCA and context is None:
        draw = random.Random(batch)  # noqa: S311 - lengths, not secrets
        return tuple((draw.randrange(max(longest - drafts, 1)), count) for _ in range(batch))
    return ((max(longest - count, 0), count),) * batch


def of_rank(preset: Preset, heads: int) -> Preset:
    """The same layer on a rank that has so many of its heads."""
    return evolve(preset, name=f"{preset.name}_h{heads}", heads=heads)


def with_topk(preset: Preset, topk: int) -> Preset:
    """The same layer with another number of selected compressed keys."""
    return evolve(preset, topk=topk)
