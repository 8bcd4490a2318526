"""`Problem`: a question to a backend's `support`, without tensors. `Reason`: a part of the answer.

This file does not import torch: any backend can be asked about any problem on any machine.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from dsv4attn.core.argument_checks import (
    at_least,
    check_count,
    check_type,
    is_flag,
    known_fields,
    known_keywords,
    shown,
)
from dsv4attn.core.cache.key_records import CODINGS, KEY_RECORDS, Coding
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, UnknownNameError

if TYPE_CHECKING:
    from dsv4attn.core.cache.layout import KVCacheLayout

__all__ = ["KEY_LAYOUTS", "CacheFacts", "Problem", "Reason", "layout_reasons", "layouts_coded_by"]

_positive = at_least(1)
_PHASES = ("decode", "prefill")


@frozen
class Reason:
    """Why a backend cannot serve a problem.

    code: stable, upper case, for programs: DEVICE, HEADS, TOPK, PAGE_SIZE, LAYOUT, DTYPE, PACKAGE, ...
    actual: the problem's value.
    allowed: the values that the backend supports.
    cure: a change that makes the problem supported; empty if there is none.
    """

    code: str
    actual: str = field(converter=str)
    allowed: str = field(converter=str)
    cure: str = ""

    @property
    def text(self) -> str:
        """Actual value, allowed values and cure on one line."""
        parts = f"{self.actual}, needs {self.allowed}{f' -> {self.cure}' if self.cure else ''}"
        return " ".join(parts.split())

    def __str__(self) -> str:
        return f"{self.code}  {self.text}"


def _dtype(value: object) -> str:
    """The name of an element type, also of one of torch's."""
    return str(value).removeprefix("torch.").removeprefix("float8_")


@known_fields
@frozen
class CacheFacts:
    """A paged cache, described.

    layout: the name of a quantised record in `KEY_RECORDS`, or "rows".
    dtype: of codes, "e4m3fn", "e4m3fnuz" or "e2m1"; of rows, "bfloat16" or "float32".
    page_size: records per page. Pages may lie any distance apart: a kernel follows the tensor's stride.
    arrangement: place of the scales, "split" (after all data of a page) or "interleaved" (after each record's data).
    group_size: number of codes that share a scale; ignored for rows.
    rounds_to_fp4: whether writers first round keys to what `v41_fp4` holds; readers do not need to know.
    """

    layout: str = "fp8_ds_mla"
    dtype: str = field(default="e4m3fn", converter=_dtype)
    page_size: int = field(default=64, validator=_positive)
    arrangement: str = "split"
    group_size: int = 64
    rounds_to_fp4: bool = False

    @classmethod
    def of(cls, layout: KVCacheLayout, page_size: int) -> CacheFacts:
        """Facts of a cache of this layout.

        layout: layout of a record.
        page_size: records of a page.
        """
        if not layout.is_quantised:
            return cls(layout.name, str(layout.dtype).removeprefix("torch."), page_size)
        codes = layout.fp8_format.value if layout.fp8_format else "e2m1"
        return cls(layout.name, codes, page_size, layout.arrangement.value, layout.group_size, layout.rounds_to_fp4)

    @property
    def row_dtype(self) -> str:
        """The dtype of keys that are read from this cache."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def shown(self) -> str:
        """The element type, with the name of the layout where the type does not tell it apart."""
        return self.dtype if self.layout in ("fp8_ds_mla", "rows") else f"{self.layout} {self.dtype}"

    @classmethod
    def named(cls, dtype: str, page_size: int) -> CacheFacts:
        """Facts of the built-in layout that has this element type.

        dtype: "e4m3fn", "e4m3fnuz", "bfloat16" or "float32".
        page_size: records of a page.
        """
        dtype = _dtype(dtype)
        return cls("rows" if dtype in ("bfloat16", "float32") else "fp8_ds_mla", dtype, page_size)


_QUANTISED = {name: record.codes for name, record in KEY_RECORDS.items()}
KEY_LAYOUTS: Mapping[str, tuple[str, ...]] = {**_QUANTISED, "rows": ("bfloat16", "float32")}
"""Every layout of keys, and its element types."""


def layouts_coded_by(codings: Container[Coding]) -> Mapping[str, tuple[str, ...]]:
    """The layouts of `KEY_LAYOUTS` that a backend reads, with their element types: rows, and records it can decode.

    codings: those that the backend's readers and writers know.
    """
    read = {}
    for name, dtypes in KEY_LAYOUTS.items():
        record = KEY_RECORDS.get(name)
        known = [dtype for dtype in dtypes if record is None or CODINGS.get((dtype, record.scale)) in codings]
        if known:
            read[name] = tuple(known)
    return read


_ROWS = "allocate the cache as bfloat16 rows"
_ROUNDS = "write with the reference backend, or without rounds_to_fp4; bytes of both are read alike"


def layout_reasons(
    problem: Problem, layouts: Mapping[str, tuple[str, ...]] = KEY_LAYOUTS, *, rounds_to_fp4: bool = False
) -> Iterator[Reason]:
    """The reasons against a problem of a backend that reads these layouts.

    Both caches of a layer must read as the same dtype.
    rounds_to_fp4: whether the backend's writers can first round keys to fp4.
    """
    for name, cache in (("window cache", problem.swa), ("compressed cache", problem.compressed)):
        if cache is not None and cache.dtype not in layouts.get(cache.layout, ()):
            allowed = ", ".join(f"{layout} of {' or '.join(dtypes)}" for layout, dtypes in layouts.items())
            yield Reason("LAYOUT", f"{name} {cache.layout} of {cache.dtype}", allowed, _ROWS)
        elif cache is not None and cache.rounds_to_fp4 and not rounds_to_fp4:
            yield Reason("LAYOUT", f"{name} that rounds to fp4 first", "a writer that rounds to fp8 alone", _ROUNDS)
    record = KEY_RECORDS.get(problem.swa.layout)
    if record is not None and record.window_record:
        cure = f"keep the window in {record.window_record}: {problem.swa.layout} is for compressed caches only"
        yield Reason("LAYOUT", f"window cache {problem.swa.layout}", "another layout of windows", cure)
    if problem.compressed is not None and problem.compressed.row_dtype != problem.swa.row_dtype:
        both = f"{problem.swa.dtype} with {problem.compressed.dtype}"
        yield Reason("LAYOUT_PAIR", both, "two caches that read as the same type", "use one row type for both")


def _phase(value: Any) -> str:  # noqa: ANN401 - a caller's value, not checked yet
    value = getattr(value, "value", value)
    if value not in _PHASES:
        raise UnknownNameError("phase", str(value), _PHASES)
    return str(value)


def _check_geometry(value: object) -> None:
    if not isinstance(value, (ModelGeometry, LayerGeometry)):
        cure = "pass ModelGeometry.preset('flash'), or what geometry.layer(i) returns"
        raise ArgumentError("geometry", expected="a ModelGeometry or LayerGeometry", actual=shown(value), hint=cure)


@known_fields
@frozen
class Problem:
    """A question to a backend's `support`: one phase of one kind of layer. Build it with `of`.

    phase: "decode" or "prefill", or a `contract.Phase`.
    layer: kind, ratio, heads, dims, window of the layers.
    swa: the window cache.
    compressed: the compressed cache; None exactly on window-only layers.
    topk: selected entries per query; the table's width on c128a layers; 0 on window-only layers.
    q_dtype: of queries and output, "bfloat16" or "float32".
    sink: whether heads have sinks.
    lse: whether the log-sum-exp is an output.
    query_len: most query tokens of a decode request; more than one if drafts are verified.
    capture: whether the call will be captured in a graph.
    deterministic: whether a row's bits must not depend on the rest of the batch.
    window_columns: columns of a row's window, at least the layer's window; 0 is the layer's window.
    """

    phase: str = field(converter=_phase)
    layer: LayerGeometry
    swa: CacheFacts = CacheFacts()
    compressed: CacheFacts | None = None
    topk: int = field(default=0, validator=at_least(0))
    q_dtype: str = field(default="bfloat16", converter=_dtype)
    sink: bool = field(default=True, validator=is_flag)
    lse: bool = field(default=False, validator=is_flag)
    query_len: int = field(default=1, validator=_positive)
    capture: bool = field(default=False, validator=is_flag)
    deterministic: bool = field(default=False, validator=is_flag)
    window_columns: int = field(default=0, validator=at_least(0))

    def __attrs_post_init__(self) -> None:
        check_type("layer", self.layer, LayerGeometry, cure="pass geometry.layer(i) or geometry.layer_of_kind(kind)")
        if 0 < self.window_columns < self.layer.window:
            expected = f"at least the {self.layer.window} of the window, or 0"
            raise ArgumentError("window_columns", expected=expected, actual=self.window_columns)
        window_only = self.layer.kind is LayerKind.SWA
        if window_only and self.topk:
            raise ArgumentError("topk", expected="0 on a window-only layer", actual=self.topk)
        if window_only is not (self.compressed is None):
            expected = "none on a window-only layer" if window_only else f"a cache on a {self.layer.kind.value} layer"
            actual = "none" if self.compressed is None else f"a cache of {self.compressed.shown}"
            raise ArgumentError("compressed", expected=expected, actual=actual)

    @classmethod
    @known_keywords
    def of(
        cls,
        geometry: ModelGeometry | LayerGeometry,
        kind: LayerKind | str = LayerKind.CSA,
        phase: str = "decode",
        *,
        heads: int | None = None,
        topk: int | None = None,
        swa_page_size: int = 64,
        compressed_page_size: int | None = None,
        dtype: str = "e4m3fn",
        max_model_len: int = 1_048_576,
        q_dtype: str = "bfloat16",
        sink: bool = True,
        lse: bool = False,
        query_len: int = 1,
        capture: bool = False,
        deterministic: bool = False,
        window_columns: int = 0,
        compress_ratio: int | None = None,
    ) -> Problem:
        """The problem of one kind of layer of a model. Keywords override what the model says.

        geometry: of the model, or of one layer.
        phase: "decode" or "prefill".
        heads: query heads; default: those of the geometry.
        swa_page_size: records of a page of the window cache.
        max_model_len: largest number of tokens of a sequence.
        q_dtype: "bfloat16" or "float32".
        sink: whether layers have a sink.
        lse: whether the caller needs lse.
        query_len: most query tokens of a decode request.
        capture: whether decodes are captured in a graph.
        deterministic: whether the bits of a token may not depend on the rest of the batch.
        window_columns: columns of window rows, if more than the window; 0: the window.
        kind: which layers of a model; ignored for a LayerGeometry.
        topk: default: that of the indexer, or on c128a layers the width of the table for `max_model_len`.
        compressed_page_size: default: the entries of 256 tokens.
        dtype: of both caches: "e4m3fn" and "e4m3fnuz" are quantised records, "bfloat16" and "float32" plain rows.
        compress_ratio: which layers of the kind, if a model has several ratios of this kind.
        """
        layer = geometry
        _check_geometry(geometry)
        check_count("max_model_len", max_model_len, 1)
        if topk is not None:
            check_count("topk", topk, 0)
        if isinstance(layer, ModelGeometry):
            layer = layer.layer_of_kind(kind, compress_ratio)
        layer = layer if heads is None else evolve(layer, num_heads=heads)
        swa, compressed, columns = CacheFacts.named(dtype, swa_page_size), None, topk or 0
        if layer.kind is not LayerKind.SWA:
            page = max(256 // layer.compress_ratio, 1) if compressed_page_size is None else compressed_page_size
            compressed = CacheFacts.named(dtype, page)
            columns = (layer.topk or layer.table_columns(max_model_len)) if topk is None else topk
            if layer.kind is LayerKind.CSA and columns > 0:
                layer = evolve(layer, topk=columns)
        elif compressed_page_size is not None:
            actual = f"a page size of {compressed_page_size}"
            raise ArgumentError("compressed", expected="none on a window-only layer", actual=actual)
        flags = capture, deterministic, window_columns
        return cls(phase, layer, swa, compressed, columns, q_dtype, sink, lse, query_len, *flags)

    def __str__(self) -> str:
        layer, record = self.layer, KEY_RECORDS.get(self.swa.layout)
        dims = f"{layer.nope_dim} + {layer.rope_dim}"
        if record is not None and not record.codes_rope:
            codes = "e2m1" if "e2m1" in record.codes else "fp8"
            dims = f"{layer.nope_dim} {codes} + {layer.rope_dim} bf16"
        pages = f"{self.swa.page_size}" + (f"+{self.compressed.page_size}" if self.compressed else "")
        kv = self.swa.shown
        if self.compressed and self.compressed.shown != kv:
            kv += f"+{self.compressed.shown}"
        text = f"{self.phase}  {layer.kind.value}  heads={layer.num_heads}  head_dim={layer.head_dim} ({dims})"
        text += f"  window={layer.window}  compress_ratio={layer.compress_ratio}  topk={self.topk}"
        text += f"  pages={pages}  kv={kv}  q={self.q_dtype}"
        text += f"  query_len={self.query_len}" if self.query_len > 1 else ""
        text += f"  window_columns={self.window_columns}" if self.window_columns > layer.window else ""
        flags = [flag for flag in ("lse", "capture", "deterministic") if getattr(self, flag)]
        flags += [] if self.sink else ["no sink"]
        return "  ".join([text, *flags, *([] if layer.q_norm else ["no q norm"])])
