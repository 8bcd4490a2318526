"""`EntryRecords`: the compressed entries that every token of a sequence attends to, for a trainer to replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.batch_checks import count_tokens
from dsv4attn.core.reprs import fields_repr
from dsv4attn.errors import ArgumentError
from dsv4attn.serving.cache_manager import CachedSequence

__all__ = ["EntryRecords"]


class EntryRecords:
    """The entries that the layers of a model select, by sequence.

    Run steps with `set_forward_context(metadata, record_entries=records.buffers)`, and call `take` after each, before
    the manager advances. A token that is run again replaces what was recorded for it: after `CacheManager.truncate`, as
    for rejected drafts, and when a sequence is computed again after preemption.

    All layers must run on all tokens of a step: rows of `AttentionMetadata.source_rows` alone are not recorded rightly.

    layers: attention layers of the model, in order. Those with an indexer of their own select.
    """

    @torch.inference_mode(mode=False)  # buffers are written in and out of the mode
    def __init__(self, layers: Iterable[DeepseekV4Attention]) -> None:
        self._selecting = [layer for layer in layers if layer.indexer is not None]
        self.buffers: dict[str, Tensor] = {}
        """[max tokens, K] int32 of each layer that selects, by its prefix: the entries of the last step."""
        for layer in self._selecting:
            assert layer.topk_indices is not None
            self.buffers[layer.prefix] = torch.full_like(layer.topk_indices, -1)
        self._records: WeakKeyDictionary[CachedSequence, list[Tensor]] = WeakKeyDictionary()

    __repr__ = fields_repr

    def take(self, requests: Sequence[tuple[CachedSequence, int]]) -> None:
        """Copy the entries of a step to the host.

        requests: (sequence, number of its tokens), as in `CacheManager.batch`, whose lengths have not advanced yet.
        Raises what `check` raises, and ArgumentError for more tokens than a step has. It takes nothing then.
        """
        self.check(requests)
        tokens = count_tokens(requests)
        for buffer in self.buffers.values():
            if tokens > len(buffer):
                expected = f"at most {len(buffer)} tokens, which is the limit of a step"
                raise ArgumentError("requests", expected=expected, actual=tokens)
        of_layers = [buffer[:tokens] for buffer in self.buffers.values()]
        of_step = (
            torch.stack(of_layers, 1).cpu() if of_layers else torch.empty(tokens, 0, dtype=torch.int32, device="cpu")
        )
        for (sequence, count), entries in zip(requests, of_step.split([n for _, n in requests]), strict=True):
            parts = self._records.setdefault(sequence, [])
            excess = self._recorded(sequence) - sequence.length
            while excess > 0:
                last = parts.pop()
                if len(last) > excess:
                    parts.append(last[:-excess])
                excess -= len(last)
            if count:
                parts.append(entries.clone())

    def check(self, requests: Sequence[tuple[CachedSequence, int]]) -> None:
        """Raise ArgumentError for a sequence that has tokens which were not recorded.

        requests: (sequence, number of its tokens) of a step that has not run yet.
        """
        for sequence, _ in requests:
            if self._recorded(sequence) < sequence.length:
                expected = f"sequences whose first {sequence.length} tokens are recorded"
                hint = "after CacheManager.fork, or a hit in a prefix cache, call fork(source, sequence)"
                actual = f"one with {self._recorded(sequence)}"
                raise ArgumentError("requests", expected=expected, actual=actual, hint=hint)

    def fork(self, source: CachedSequence, sequence: CachedSequence) -> None:
        """Give a sequence the records of its tokens so far, which are the first ones of another.

        source: the sequence whose tokens were recorded.
        sequence: the fork, or a sequence with a hit in a prefix cache.
        Raises ArgumentError if fewer tokens of the source are recorded.
        """
        if self._recorded(source) < sequence.length:
            expected, actual = f"records of {sequence.length} tokens", self._recorded(source)
            raise ArgumentError("source", expected=expected, actual=actual)
        if sequence.length:
            self._records[sequence] = [torch.cat(self._records[source])[: sequence.length]]

    def of(self, sequence: CachedSequence) -> dict[int, Tensor]:
        """[tokens, K] int32 on the CPU for each layer that selects, by its number: ascending entries, then -1.

        Tokens that `CacheManager.truncate` took back are not among them. Ask before the sequence is freed, or such
        tokens are.
        sequence: one whose steps were taken, and have advanced.
        """
        parts = self._records.get(sequence, [])
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        whole = parts[0][: None if sequence.owner is None else sequence.length] if parts else None
        return {
            layer.index: self._none(layer) if whole is None else whole[:, i] for i, layer in enumerate(self._selecting)
        }

    def injected(
        self, requests: Sequence[tuple[CachedSequence, int]], entries: Sequence[Mapping[int, Tensor]]
    ) -> dict[str, Tensor]:
        """`inject_entries` of a step: what was recorded for the next tokens of its sequences.

        requests: as of `take`.
        entries: for each request, what `of` returned for the sequence to be replayed.
        """
        if len(entries) != len(requests):
            raise ArgumentError("entries", expected=f"one for each of {len(requests)} requests", actual=len(entries))
        injected = {}
        for layer in self._selecting:
            rows = []
            for (sequence, count), recorded in zip(requests, entries, strict=True):
                of_layer = recorded.get(layer.index, self._none(layer))
                part = of_layer[sequence.length : sequence.length + count]
                if len(part) < count:
                    expected = f"entries of {sequence.length + count} tokens for layer {layer.index}"
                    raise ArgumentError("entries", expected=expected, actual=len(of_layer))
                rows.append(part)
            injected[layer.prefix] = (torch.cat(rows) if rows else self._none(layer)).to(layer.device)
        return injected

    @staticmethod
    def _none(layer: DeepseekV4Attention) -> Tensor:
        """[0, K]: entries of no token."""
        return torch.empty(0, layer.layer.topk, dtype=torch.int32, device="cpu")

    def _recorded(self, sequence: CachedSequence) -> int:
        return sum(map(len, self._records.get(sequence, ())))
