"""Makes docs/tutorial.ipynb from docs/tutorial.md, what its blocks print, and the pictures of the page.

`python docs/tutorial.py` runs the blocks, writes what they print below them, and writes the notebook. With `--draw` it
draws the pictures too, which needs matplotlib.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import evolve

import dsv4attn as ds
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.wrapped import WrappedBackend
from dsv4attn.tools.cli.show import draw_keys, seen_keys

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
INK, FAINT, EDGE = "#222222", "#666666", "#8C959F"
KINDS = {ds.LayerKind.SWA: "#0072B2", ds.LayerKind.CSA: "#D55E00", ds.LayerKind.HCA: "#009E73"}
STEPS = (
    ("describe the batch, once a step", "Batch, or CacheManager.batch", ()),
    (
        "build the metadata, once a step",
        "MetadataBuilder: windows, visible entries, slots",
        (
            *("build_token_maps", "build_window_indices", "build_gather_lens"),
            *("build_compressed_slot_mapping", "compute_global_topk_indices_and_lens"),
        ),
    ),
    ("project hidden states to queries and rows", "products, norm_q_kv", ("norm_q_kv",)),
    ("rotate; write rows to the window cache", "qnorm_rope_kv_insert", ("qnorm_rope_kv_insert",)),
    (
        "save states, write complete entries",
        "save_partial_states, compress_norm_rope_store",
        ("save_partial_states", "compress_norm_rope_store"),
    ),
    (
        "the same for index keys",
        "save_partial_states, compress_norm_rope_store",
        ("save_partial_states", "compress_norm_rope_store"),
    ),
    ("score entries, select", "indexer_q_rope_quant, select_topk", ("indexer_q_rope_quant", "select_topk")),
    ("attend: prefills", "dequantize_and_gather_k_cache, prefill", ("dequantize_and_gather_k_cache", "prefill")),
    ("attend: decodes", "decode", ("decode",)),
    ("rotate back, project the output", "inv_rope_o_proj, product with wo_b", ("inv_rope_o_proj",)),
    ("count the tokens, free old window pages", "CacheManager.advance", ()),
)
"""What one step does: a sentence, names of the library, and the ops that are recorded."""


def cells(page: str) -> list[tuple[str, str, str]]:
    """("markdown" or "code", source, output) of each cell of a page, in order."""
    pieces = re.split(r"(?s)```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", page)
    found = []
    for prose, code, output in zip_longest(pieces[::3], pieces[1::3], pieces[2::3]):
        found.append(("markdown", prose.strip(), ""))
        if code is not None:
            found.append(("code", code.strip(), output or ""))
    return [cell for cell in found if cell[1]]


def run(page: str) -> list[str]:
    """What each code cell of a page prints, when all run one after the other in one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for kind, source, _ in cells(page):
        if kind == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, PAGE.name, "exec"), names)  # noqa: S102 - our own text
            printed.append(out.getvalue())
    return printed


def with_outputs(page: str) -> str:
    """The page with what its blocks print."""
    printed = iter([text for text in run(page) if text])
    return re.sub(r"(?s)```text\n.*?```", lambda _: f"```text\n{next(printed)}```", page)


def notebook(page: str) -> str:
    """The page as a notebook, in version 4.5 of the format."""
    made: list[dict[str, Any]] = []
    for kind, source, output in cells(page):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{len(made)}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        if kind == "code":
            stream = {"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}
            cell |= {"execution_count": None, "outputs": [stream] if output else []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


class Recorder(WrappedBackend):
    """A backend that notes the names of its ops as they run."""

    def __init__(self, wrapped: ds.Backend) -> None:
        super().__init__(wrapped)
        self.calls: list[str] = []
        for name in ("qnorm_rope_kv_insert", "dequantize_and_gather_k_cache", "inv_rope_o_proj"):
            setattr(self, name, self._noted(name, getattr(wrapped, name)))
        self.layer_ops = self._noted_table(wrapped.layer_ops)
        self.builder_ops = self._noted_table(wrapped.builder_ops or BuilderOps())

    def prepare(self, phase: Any, call: Any) -> Callable[..., None]:
        return self._noted(phase.value, self.wrapped.prepare(phase, call))

    def _noted_table(self, table: Any) -> Any:
        ops = {name for _, _, names in STEPS for name in names}
        names = [field.name for field in attrs.fields(type(table)) if field.name in ops]
        return evolve(table, **{name: self._noted(name, getattr(table, name)) for name in names})

    def _noted(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return op(*args, **options)

        return noted


def recorded(kind: ds.LayerKind) -> list[bool]:
    """Which of STEPS a step with a decode and a prompt runs in a layer of a kind. Raises ValueError for other ops."""
    sizes: dict[str, Any] = {
        "num_heads": 2,
        "o_groups": 2,
        "hidden_size": 64,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "index_topk": 8,
        "index_n_heads": 16,
    }
    recorder = Recorder(ds.load_backend("reference"))
    layer = ds.SingleLayer(evolve(ds.ModelGeometry.preset("flash"), **sizes), kind, backend=recorder)
    request = layer.new_request()
    layer.step((request, layer.random_hidden(150)))
    recorder.calls.clear()
    layer.step((request, layer.random_hidden(1)), (layer.new_request(), layer.random_hidden(90)))
    calls = [name for i, name in enumerate(recorder.calls) if name not in recorder.calls[i - 1 : i]]
    first = next(i for i, name in enumerate(calls) if name == "norm_q_kv")
    calls[:first] = dict.fromkeys(calls[:first])
    runs = []
    for _, _, ops in STEPS:
        taken = 0
        while taken < len(ops) and taken < len(calls) and calls[taken] in ops and calls[taken] not in calls[:taken]:
            taken += 1
        runs.append(not ops or taken > 0)
        del calls[:taken]
    if calls:
        raise ValueError(f"no step has {calls}")
    return runs


def keys_picture() -> Figure:
    """Which keys each token of a small prompt sees, for each kind of layers."""
    layers = [(kind, {"swa": 1, "c4a": 4, "c128a": 16}[kind.value]) for kind in KINDS]
    model = evolve(ds.ModelGeometry.preset("flash"), window=8, index_topk=3).with_own_layers(layers)
    return draw_keys([seen_keys(model, kind, 40) for kind in KINDS])


def _sheet(height: float) -> tuple[Figure, Axes]:
    """A figure and its axes, whose units are inches. It is narrow, so that text is readable on a narrow screen."""
    from matplotlib.figure import Figure as New

    figure = New(figsize=(4.2, height), dpi=200)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 4.2), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def _box(axes: Axes, x: float, y: float, width: float, text: str, colour: str, height: float = 0.38) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=EDGE, linewidth=0.6))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=6.5, color=INK)


def page_picture() -> Figure:
    """Where the bytes of a page of 64 records lie, from the layout."""
    layout, records = ds.KVCacheLayout.fp8_ds_mla(), 64
    codes, rope, scale = layout.regions(records)
    data, end, stride = layout.data_bytes, layout.page_bytes(records), layout.page_stride(records)
    figure, axes = _sheet(3.3)
    blue, green, orange, gray = "#CFE4F3", "#CDEBDF", "#F9DDC4", "#EEEEEE"

    def title(y: float, text: str) -> None:
        axes.text(0.1, y, text, fontsize=8.5, fontweight="bold", color=INK, va="center")

    def byte(x: float, y: float, offset: int | str) -> None:
        text = f"{offset:,}" if isinstance(offset, int) else offset
        axes.text(x, y, text, fontsize=6.5, color=FAINT, ha="center", va="center")

    title(0.15, f"A page of {records} records: {stride:,} bytes")
    first, last = scale.offset, (records - 1) * scale.stride
    parts: list[tuple[float, str, str, int | str]] = [
        *((0.58, f"data {i}", blue, i * data) for i in (0, 1)),
        (0.2, "...", "#FFFFFF", ""),
        (0.58, f"data {records - 1}", blue, (records - 1) * data),
        *((0.41, f"scales\n{i}", orange, first + i * scale.stride) for i in (0, 1)),
        (0.2, "...", "#FFFFFF", ""),
        (0.41, f"scales\n{records - 1}", orange, first + last),
        (0.5, "padding", gray, end),
    ]
    x = 0.15
    for i, (width, text, colour, offset) in enumerate(parts):
        _box(axes, x, 0.45, width, text, colour)
        byte(x, 0.37 if i % 2 == 0 else 0.93, offset)
        x += width
    byte(x - 0.08, 0.93, stride)
    title(1.22, f"The data of record i: {data} bytes, from byte i * {codes.stride}")
    lefts = [0.15 + 0.39 * i for i in range(layout.num_groups + 1)]
    for i, left in enumerate(lefts[:-1]):
        _box(axes, left, 1.5, 0.39, f"{layout.group_size}\nfp8", blue)
        byte(left, 1.42, i * layout.group_size)
    _box(axes, lefts[-1], 1.5, 1.09, f"{rope.count} bf16,\nthe rotated part", green)
    byte(lefts[-1], 1.42, rope.offset)
    byte(3.9, 1.42, data)
    title(2.3, f"The scales of record i: {scale.stride} bytes, from {first:,} + i * {scale.stride}")
    for i, left in enumerate(lefts):
        used = i < layout.num_groups
        _box(axes, left, 2.58, 0.39, f"e{i}" if used else "pad", orange if used else gray)
        byte(left, 2.5, i)
        if used:
            arrow = {"arrowstyle": "->", "color": EDGE, "lw": 0.7}
            axes.annotate("", (left + 0.19, 1.91), (left + 0.19, 2.18), arrowprops=arrow)
    formula = "an element of group g is its fp8 code * 2 ** (e[g] - 127)"
    axes.text(0.15, 3.14, formula, fontsize=7.5, color=INK, va="center")
    return figure


def step_picture() -> Figure:
    """What one step does, and in which kinds of layers."""
    height, top = 0.4, 0.4
    figure, axes = _sheet(top + height * len(STEPS) + 0.1)
    runs = {kind: recorded(kind) for kind in KINDS}
    columns = {kind: 3.06 + 0.44 * j for j, kind in enumerate(KINDS)}
    axes.text(0.1, 0.2, "One step (blue: in every layer)", fontsize=8.5, fontweight="bold", color=INK, va="center")
    for kind, x in columns.items():
        axes.text(x, 0.2, kind.value, fontsize=8, fontweight="bold", color=KINDS[kind], ha="center", va="center")
    for i, (sentence, names, _) in enumerate(STEPS):
        y, in_layer = top + height * i, 2 <= i < len(STEPS) - 1
        _box(axes, 0.1, y, 4.0, "", "#E6F0F8" if in_layer else "#FFFFFF", height)
        axes.text(0.17, y + 0.13, f"{i + 1}. {sentence}", fontsize=7.5, fontweight="bold", color=INK, va="center")
        axes.text(0.31, y + 0.285, names, fontsize=6.5, color=FAINT, va="center")
        for kind, x in columns.items():
            if runs[kind][i]:
                axes.plot([x], [y + height / 2], "o", color=KINDS[kind], markersize=6)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"keys": keys_picture, "page": page_picture, "step": step_picture}
"""Functions that draw docs/pictures/tutorial-NAME.png."""


def draw(folder: Path) -> list[Path]:
    """Write all pictures to a folder, in 64 colours, which makes small files."""
    from PIL import Image

    paths = []
    for name, picture in PICTURES.items():
        paths.append(folder / f"tutorial-{name}.png")
        picture().savefig(paths[-1])
        Image.open(paths[-1]).convert("RGB").quantize(64).save(paths[-1], optimize=True)
    return paths


if __name__ == "__main__":
    PAGE.write_text(with_outputs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if "--draw" in sys.argv:
        draw(DOCS / "pictures")
