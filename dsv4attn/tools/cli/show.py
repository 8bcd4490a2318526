"""`dsv4attn show`: which keys each token of a prompt attends to, as text and as a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve, frozen

from dsv4attn.core.argument_checks import check_count
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.reprs import counted
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli import OK, print_json
from dsv4attn.tools.cli.common import check_matplotlib, console, geometry_of, require_torch
from dsv4attn.tools.cli.options import JSON, MODEL, choice, integer, options, output_file, text, token_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

_MOST_ROWS, _MOST_COLUMNS = 2048, 100
"""Tokens of a prompt that is drawn as a picture, and as text."""
_WIDTH, _HEIGHT = 4.2, 2.1
"""Inches of a picture, and of each layer in it: text stays readable on a narrow screen."""
_COLOURS = ("#FFFFFF", "#E5E5E5", "#0072B2", "#F9E0AE", "#D55E00")
_MEANINGS = ("", "past, not attended to", "key of a token", "entry, not selected", "entry, attended to")
_NONE, _PAST, _KEY, _VISIBLE, _ENTRY = range(5)


@frozen
class SeenKeys:
    """Keys that the last tokens of a prompt attend to in one layer. Rows are tokens in order, up to the last token.

    layer: geometry of the layer.
    length: tokens of the prompt.
    windows: first and last position of the window of each row.
    visible: how many entries are complete at each row.
    entries: numbers of the entries that each row attends to, ascending.
    """

    layer: LayerGeometry
    length: int
    windows: list[tuple[int, int]]
    visible: list[int]
    entries: list[list[int]]

    @property
    def title(self) -> str:
        """Kind, window, and what an entry is."""
        layer = self.layer
        chosen = {LayerKind.SWA: "", LayerKind.CSA: f", at most {layer.topk} selected"}.get(layer.kind, ", all of them")
        entries = f", entries of {counted(layer.compress_ratio, 'token')}{chosen}" if layer.has_entries else ""
        return f"{layer.kind.value}: window of {counted(layer.window, 'token')}{entries}"

    @property
    def last(self) -> str:
        """What the last token attends to, in a sentence."""
        (first, end), visible, entries = self.windows[-1], self.visible[-1], self.entries[-1]
        count = counted(end - first + 1 + len(entries), "key")
        seen = f" and {len(entries):,} of {counted(visible, 'entry', 'entries')}" if self.layer.has_entries else ""
        return f"token {end:,} attends to tokens {first:,} to {end:,}{seen}: {count}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        layer, first = self.layer, self.length - len(self.windows)
        rows = zip(self.windows, self.visible, self.entries, strict=True)
        return {
            "kind": layer.kind.value,
            "window": layer.window,
            "compress_ratio": layer.compress_ratio,
            "topk": layer.topk,
            "tokens": [
                {"position": first + i, "window": list(window), "visible_entries": visible, "entries": entries}
                for i, (window, visible, entries) in enumerate(rows)
            ],
        }

    def text(self) -> str:
        """A line for each token: `#` is a key it attends to, `o` an entry that was not selected, `.` any other key."""
        count, lines = self.layer.entries(self.length), []
        digits = max(len(str(self.length - 1)), len("token"))
        head = f"{'token':>{digits}}  {'keys of tokens':<{self.length}}"
        lines.append(f"{head}  entries" if count else head.rstrip())
        for i, (window, visible, entries) in enumerate(zip(self.windows, self.visible, self.entries, strict=True)):
            keys = "".join(".#"[window[0] <= key <= window[1]] for key in range(self.length))
            of_entries = "".join("#" if e in entries else ".o"[e < visible] for e in range(count))
            lines.append(f"{self.length - len(self.windows) + i:>{digits}}  {keys}  {of_entries}".rstrip())
        return "\n".join(lines)


def seen_keys(
    model: ModelGeometry,
    kind: LayerKind | str,
    length: int,
    *,
    compress_ratio: int | None = None,
    topk_indices: Tensor | None = None,
    rows: int | None = None,
    seed: int = 0,
) -> SeenKeys:
    """Which keys the last tokens of one prompt attend to, read off the metadata that backends get.

    model: geometry of the model.
    kind: kind of the layer, such as "c4a".
    length: tokens of the prompt.
    compress_ratio: tokens of an entry, if the model has layers of this kind with several ratios.
    topk_indices: [rows, K] int - entry numbers that each row selects in a c4a layer, -1 for none. An entry that a row
       does not see is ignored, as backends ignore it. None: entries at random.
    rows: how many of the last tokens; None: all.
    seed: of the random selection.
    Raises ArgumentError for what does not fit.
    """
    import torch

    from dsv4attn.core.metadata.builder import MetadataBuilder
    from dsv4attn.core.metadata.metadata import Batch

    rows = check_count("length", length, 1) if rows is None else check_count("rows", rows, 1)
    if rows > length:
        raise ArgumentError("rows", expected=f"at most the {length} tokens of the prompt", actual=rows)
    layer = model.layer_of_kind(kind, compress_ratio)
    model = evolve(model, window=min(model.window, length))  # no token sees more, and windows have buffers
    ratio, pages = layer.compress_ratio, -(-length // 64)
    builder = MetadataBuilder(
        model.with_own_layers([layer.key]), Limits(1, rows, length), compressed_block_tokens=64 * ratio
    )
    starts = torch.tensor([0, rows], dtype=torch.int32, device="cpu")
    lens = torch.tensor([length], dtype=torch.int32, device="cpu")
    table = torch.arange(pages, dtype=torch.int32, device="cpu")[None]  # a slot is then the position of its token
    batch = Batch(
        num_reqs=1,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        slot_mapping=torch.arange(length - rows, length, dtype=torch.int64, device="cpu"),
        block_table=table,
        compressed_block_table=table[:, : -(-pages // ratio)],
    )
    metadata = builder.build_for(batch, [layer.kind])[layer.kind]
    swa, compressed = metadata.swa, metadata.compressed
    first = torch.cat([swa.decode_swa_indices, swa.prefill_swa_indices])[:, 0, 0]
    counts = torch.cat([swa.decode_swa_lens, swa.prefill_swa_lens])
    visible = [0] * rows if compressed is None else compressed.compressed_lens.tolist()
    entries = [list(range(n)) for n in visible] if layer.kind is LayerKind.HCA else [[] for _ in visible]
    if layer.topk:
        if topk_indices is None:
            shape, drawn = (rows, layer.entries(length)), torch.Generator().manual_seed(seed)
            scores = torch.rand(shape, generator=drawn, dtype=torch.float32, device="cpu")
            ends = torch.tensor(visible, dtype=torch.int32, device="cpu")
            unseen = torch.arange(scores.shape[1], dtype=torch.int32, device="cpu") >= ends[:, None]
            best = scores.masked_fill_(unseen, -1).topk(min(layer.topk, scores.shape[1]))
            topk_indices = best.indices.masked_fill(best.values < 0, -1)
        elif topk_indices.ndim != 2 or topk_indices.shape[0] != rows or topk_indices.shape[1] > layer.topk:
            expected = f"[{rows}, K] with at most {layer.topk} columns"
            raise ArgumentError("topk_indices", expected=expected, actual=list(topk_indices.shape))
        entries = [
            sorted({e for e in row if 0 <= e < n}) for row, n in zip(topk_indices.tolist(), visible, strict=True)
        ]
    windows = [(a, a + n - 1) for a, n in zip(first.tolist(), counts.tolist(), strict=True)]
    return SeenKeys(layer, length, windows, visible, entries)


def draw_keys(pictures: Sequence[SeenKeys]) -> Figure:
    """Draw layers one below the other: keys of tokens at the left, entries at the right. It needs matplotlib.

    pictures: what `seen_keys` returned, for prompts of at most 2,048 tokens.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(pictures) + 0.5), dpi=200, layout="constrained")
    shown = set[int]()
    for seen, part in zip(pictures, figure.subfigures(len(pictures), 1, squeeze=False)[:, 0], strict=True):
        part.suptitle(seen.title.replace(", entries", "\nentries"), fontsize=8.5, fontweight="bold")
        left, right = part.subplots(1, 2, sharey=True)
        positions = range(seen.length - len(seen.windows), seen.length)
        cells = [
            [_KEY if a <= key <= b else _PAST if key < a else _NONE for key in range(seen.length)]
            for a, b in seen.windows
        ]
        shown |= {cell for row in cells for cell in row}
        _draw_cells(left, cells, range(seen.length + 1), positions, "key of token")
        left.set_ylabel("query token", fontsize=8)
        if not seen.layer.has_entries:
            right.set_visible(False)
            continue
        ratio, count = seen.layer.compress_ratio, seen.layer.entries(seen.length)
        cells = [
            [_ENTRY if e in set(own) else _VISIBLE if e < n else _NONE for e in range(count)]
            for n, own in zip(seen.visible, seen.entries, strict=True)
        ]
        shown |= {cell for row in cells for cell in row}
        _draw_cells(right, cells, range(0, count * ratio + 1, ratio), positions, "entry, over its tokens")
        right.set_xlim(0, seen.length)
    patches = [Patch(color=_COLOURS[i], label=_MEANINGS[i]) for i in sorted(shown - {_NONE})]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _draw_cells(axes: Axes, cells: list[list[int]], edges: range, positions: range, label: str) -> None:
    """Draw one cell for each query token and key. edges: where the cells of a row begin and end."""
    from matplotlib.colors import ListedColormap

    lines: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.25} if len(positions) <= 64 else {}
    rows = range(positions.start, positions.stop + 1)
    if len(edges) > 1:
        axes.pcolormesh(edges, rows, cells, cmap=ListedColormap(_COLOURS), vmin=0, vmax=len(_COLOURS) - 1, **lines)
    axes.set_ylim(rows[-1], rows[0])
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[["right", "top"]].set_visible(False)


def _entry_numbers(_: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Parse `0,3,7`."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(re.fullmatch("[0-9]{1,20}", part) for part in parts) or len(set(parts)) < len(parts):
        message = f"{value!r}: expected different entry numbers with commas, as in 0,3,7"
        raise click.BadParameter(message, param=parameter)
    return [*map(int, parts)]


@click.command()
@options(
    MODEL,
    choice("--layer", words=[kind.value for kind in LayerKind], help="Kind of layers.  [default: all of the model's]"),
    token_count("--length", default=4096, help="Tokens of the prompt. Prompts of at most 100 tokens are drawn as text, "
                "of at most 2,048 as a picture; of a longer one the last token is described."),
    integer("--window", help="Tokens of the window, in place of the model's."),
    integer("--compress-ratio", help="Tokens of an entry, in place of the model's."),
    integer("--topk", help="Entries that a token of a c4a layer selects, in place of the model's."),
    text("--entries", metavar="NUMBERS", callback=_entry_numbers, help="Entries that every token of a c4a layer "
         "selects if it sees them, with commas.  [default: at random]"),
    integer("--seed", least=0, default=0, most=2**63 - 1, help="Seed of the random selection. A model's indexer "
            "selects by scores."),
    output_file("--plot", help="Draw a picture into FILE, such as keys.png or keys.svg."),
    JSON,
)  # fmt: skip
@click.pass_context
def show(
    ctx: click.Context,
    /,
    *,
    model: str,
    layer: str | None,
    length: int,
    window: int | None,
    compress_ratio: int | None,
    topk: int | None,
    entries: list[int] | None,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Show which keys each token of a prompt attends to, by kind of layer.

    The keys are read off the metadata that backends get. A small example: --length 40 --window 8 --topk 3.

    \b
    Exit codes:
      0    the keys were shown
      2    bad input
    """  # noqa: D301 - click wants the character
    require_torch(ctx)
    if plot:
        check_matplotlib()
        if length > _MOST_ROWS:
            raise ArgumentError("--length", expected=f"at most {_MOST_ROWS:,} with --plot", actual=length)
    geometry = geometry_of(model)
    if length > geometry.max_position:
        expected = f"at most {geometry.max_position}, the longest context of {geometry.name}"
        raise ArgumentError("--length", expected=expected, actual=length)
    for name, value in (("--topk", topk), ("--entries", entries)):
        if value is not None and layer not in (None, LayerKind.CSA.value):
            raise ArgumentError(name, expected="a c4a layer", actual=layer)
    geometry = _changed(geometry, layer, window, compress_ratio, topk)
    layers = geometry.distinct_layers if layer is None else geometry.layers_of_kind(layer)
    rows = length if length <= _MOST_ROWS else 1
    pictures = [
        seen_keys(
            geometry,
            one.kind,
            length,
            compress_ratio=one.compress_ratio,
            topk_indices=_for_all_rows(entries, rows, one, length) if entries and one.topk else None,
            rows=rows,
            seed=seed,
        )
        for one in layers
    ]
    if plot:
        try:
            draw_keys(pictures).savefig(plot)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{plot} cannot be drawn: {error}") from error
    if as_json:
        print_json({"ok": True, "model": geometry.name, "length": length, "layers": [p.as_json() for p in pictures]})
        ctx.exit(OK)
    for i, picture in enumerate(pictures):
        drawn = [picture.text()] if length <= _MOST_COLUMNS else []
        lines = [*([""] if i and drawn else []), picture.title, *drawn, picture.last]
        console().print("\n".join(lines), soft_wrap=bool(drawn))


def _changed(
    model: ModelGeometry, layer: str | None, window: int | None, compress_ratio: int | None, topk: int | None
) -> ModelGeometry:
    """The model with the sizes that the command line names."""
    model = evolve(model, window=window or model.window, index_topk=topk or model.index_topk)
    if compress_ratio is None:
        return model
    if layer in (None, LayerKind.SWA.value):
        hint = "add --layer c4a or --layer c128a"
        raise ArgumentError("--compress-ratio", expected="a kind of layers with entries", actual=layer, hint=hint)
    return model.with_own_layers([(LayerKind(layer), compress_ratio)])


def _for_all_rows(entries: list[int], rows: int, layer: LayerGeometry, length: int) -> Tensor:
    """The same entries for each row. Raises ArgumentError for an entry that the prompt does not have."""
    import torch

    if len(entries) > layer.topk:
        expected = f"at most {layer.topk} entries, which a token selects"
        raise ArgumentError("--entries", expected=expected, actual=len(entries), hint="raise --topk")
    count = layer.entries(length)
    if max(entries) >= count:
        expected = f"numbers below {count}, the entries of {length} tokens"
        raise ArgumentError("--entries", expected=expected, actual=max(entries))
    return torch.tensor(entries, dtype=torch.int64, device="cpu").expand(rows, -1)
