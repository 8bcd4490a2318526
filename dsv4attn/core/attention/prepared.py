"""Prepared calls: checked and planned for the first layer of a kind, run by every layer that differs in addresses.

A `PreparedForward` is an entry of `DeepseekSparseSWAMetadata.prepared` and lives as long as these metadata. Its key is
the identities of backend, layer, limits, workspace and compressed metadata, and the signatures of caches and tensors
(`tensorspec.signature`). Addresses and values of tensors are not part of the key.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, frozen

from dsv4attn.core.contract.backend import Run

__all__ = ["MAX_PREPARED", "PreparedCall", "PreparedForward"]

MAX_PREPARED = 64
"""Most entries of one metadata object; kinds of layers x sizes of padding are far fewer."""


@frozen(eq=False)
class PreparedCall:
    """One prepared `PhaseCall`.

    name: the call's name in profiles.
    tokens: the rows of q and out that it computes.
    run: `run(tensors)` fills the index buffers of the call and attends, for the tensors of one layer, of all tokens.
    """

    name: str
    tokens: slice
    run: Run


@define(eq=False)
class PreparedForward:
    """The prepared calls of one `ForwardCall`.

    num_tokens: number of tokens of the batch; later rows of q are padding.
    calls: prepared calls, in order; None once their views of the workspace were released.
    owners: the objects whose identities are in the key.
    q_bytes, out_bytes: bytes from the first element of q and out to the end of the last one.
    """

    num_tokens: int
    calls: Iterable[PreparedCall] | None
    owners: tuple[object, ...]
    q_bytes: int = 0
    out_bytes: int = 0

    def release(self) -> None:
        """Drop the views of a workspace whose memory moved; the next layer prepares its calls again."""
        self.calls = None
