"""Attention and feed-forward between hyper-connections, from streams to streams: a layer of V4, and one of V4.1."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen
from torch import Tensor

from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.layer.hyper_connections import HyperConnections

__all__ = ["DeepseekV4DecoderLayer", "DeepseekV41DecoderLayer"]


@frozen(eq=False)
class _Sublayers:
    """Both sublayers of a layer."""

    attention: DeepseekV4Attention
    feed_forward: Callable[[Tensor], Tensor]
    attention_streams: HyperConnections
    feed_forward_streams: HyperConnections

    def refresh(self) -> None:
        """Make every copy of a weight again, in the same memory; see `DeepseekV4Attention.refresh`."""
        for part in (self.attention, self.attention_streams, self.feed_forward_streams):
            part.refresh()


@frozen(eq=False)
class DeepseekV4DecoderLayer(_Sublayers):
    """One layer of the model.

    attention: the attention sublayer.
    feed_forward: the other sublayer, which the engine brings: [T, d] to [T, d].
    attention_streams: hyper-connections around attention, with its norm.
    feed_forward_streams: hyper-connections around the feed-forward, with its norm.
    """

    def __call__(self, streams: Tensor, positions: Tensor) -> Tensor:
        """New streams [T, n, d] of streams [T, n, d] at positions [T], in the current step."""
        post, comb, hidden = self.attention_streams.pre(streams)
        attended = self.attention(hidden, positions)
        streams, post, comb, hidden = self.feed_forward_streams.after(attended, streams, post, comb)
        return self.feed_forward_streams.post(self.feed_forward(hidden), streams, post, comb)


@frozen(eq=False)
class DeepseekV41DecoderLayer(_Sublayers):
    """One layer of a V4.1 model, whose hyper-connections take the pre of the previous sublayer.

    attention: the attention sublayer.
    feed_forward: the other sublayer, which the engine brings: [T, d] to [T, d].
    attention_streams: hyper-connections around attention, with its norm.
    feed_forward_streams: hyper-connections around the feed-forward, with its norm.
    """

    def __call__(self, streams: Tensor, positions: Tensor, previous_pre: Tensor | None) -> tuple[Tensor, Tensor]:
        """(new streams [T, n, d], pre [T, n]) of streams [T, n, d] at positions [T], in the current step.

        previous_pre: [T, n], the pre that the previous layer returned; None for the first layer. After the last layer
        `HyperConnections.collapse` makes hidden states of the streams and the pre.
        """
        pre, post, comb, hidden = self.attention_streams.pre_delayed(streams, previous_pre)
        attended = self.attention(hidden, positions)
        streams, pre, post, comb, hidden = self.feed_forward_streams.after_delayed(attended, streams, post, comb, pre)
        return self.feed_forward_streams.post(self.feed_forward(hidden), streams, post, comb), pre
