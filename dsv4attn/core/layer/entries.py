"""Selected entries that a layer records, and entries that it takes instead of its own selection."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import check_type
from dsv4attn.core.metadata.forward_context import ForwardContext
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.reprs import frozen
from dsv4attn.core.tensorspec import check_strides
from dsv4attn.errors import ArgumentError

__all__ = ["NO_ENTRIES", "StepEntries", "check_entries", "visible_entries"]


@frozen(eq=False)
class StepEntries:
    """Entries of the tokens of a step, each [>= T, K] int32 or None.

    record: where the layer copies what it selected, or took.
    inject: what it takes instead of a selection.
    """

    record: Tensor | None = None
    inject: Tensor | None = None

    @classmethod
    def checked(
        cls,
        context: ForwardContext,
        prefix: str,
        metadata: AttentionMetadata,
        buffer: Tensor,
        *,
        over_ranks: bool,
        captured: bool,
    ) -> StepEntries:
        """What a step names for the layer of this prefix. Raises ArgumentError unless it fits the step.

        buffer: [max tokens, K] int32 of the layer's selections. over_ranks: whether ranks divide the entries.
        captured: whether a graph is captured; values are not read then.
        """
        record, inject = context.entries(prefix)
        if record is inject is None:
            return NO_ENTRIES
        if over_ranks:
            expected = "None with context_parallel, whose ranks number entries for themselves"
            raise ArgumentError("record_entries, inject_entries", expected=expected, actual="tensors")
        for name, entries in (("record_entries", record), ("inject_entries", inject)):
            if entries is not None:
                _check_form(f"{name}[{prefix!r}]", entries, metadata.swa.num_actual_tokens, buffer)
        if record is not None:
            name = f"record_entries[{prefix!r}]"
            check_strides(written=(name,), **{name: record})
            if record.is_inference() and not torch.is_inference_mode_enabled():
                expected, cure = "a tensor that may be written here", "make it outside of torch.inference_mode()"
                raise ArgumentError(name, expected=expected, actual="one made in inference mode", hint=cure)
        if inject is not None and not captured:
            tokens = metadata.swa.num_actual_tokens
            check_entries(f"inject_entries[{prefix!r}]", inject[:tokens], visible_entries(metadata))
        return cls(record, inject)

    def keep(self, topk_indices: Tensor, metadata: AttentionMetadata) -> None:
        """Record what is in the layer's buffer now."""
        if self.record is not None:
            tokens = metadata.swa.num_actual_tokens
            self.record[:tokens].copy_(topk_indices[:tokens])


NO_ENTRIES = StepEntries()


def _check_form(name: str, entries: Tensor, tokens: int, buffer: Tensor) -> None:
    """Raise ArgumentError unless `entries` are [>= tokens, K] int32, as the layer's buffer [max tokens, K] is."""
    check_type(name, entries, Tensor, cure="give a tensor of a row for each token")
    shape, columns = list(entries.shape), buffer.shape[1]
    if len(shape) != 2 or shape[0] < tokens or shape[1] != columns:
        expected = f"[{tokens}, {columns}], a row for each token"
        raise ArgumentError(name, expected=expected, actual=shape)
    if entries.dtype != torch.int32 or entries.device != buffer.device:
        actual = f"{str(entries.dtype).removeprefix('torch.')} on {entries.device}"
        raise ArgumentError(name, expected=f"int32 on {buffer.device}", actual=actual)


def check_entries(name: str, entries: Tensor, lens: Tensor) -> None:
    """Raise ArgumentError unless each token has entries that it sees, ascending, and -1 after them.

    entries: [T, K]. lens: [T] - how many entries each token sees.
    """
    ends = entries[:, 1:] < 0
    ascends = ends | ((entries[:, :-1] >= 0) & (entries[:, 1:] > entries[:, :-1]))
    wrong = ~ascends.all(1) | (entries < -1).any(1) | (entries >= lens[:, None]).any(1)
    rows = wrong.nonzero()[:, 0].tolist()
    if rows:
        row = rows[0]
        expected = f"ascending numbers below {int(lens[row])}, the entries that the token sees, then -1"
        raise ArgumentError(f"{name}[{row}]", expected=expected, actual=f"{entries[row, :8].tolist()} ...")


def visible_entries(metadata: AttentionMetadata) -> Tensor:
    """[T] int32: how many entries each token sees. With context_parallel a decode sees those of one rank."""
    assert metadata.compressed is not None
    lens = metadata.compressed.compressed_lens
    if metadata.whole is None or metadata.whole.metadata.compressed is None:
        return lens
    decodes = metadata.swa.num_decode_tokens
    return torch.cat([lens[:decodes], metadata.whole.metadata.compressed.compressed_lens[decodes:]])
