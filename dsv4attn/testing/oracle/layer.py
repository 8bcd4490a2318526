"""The oracle of the layer around attention: compressor, indexer, selection and hyper-connections in float64 numpy.

Like `oracle.attention`, it shares no code with what it judges; every loop follows the written rule. Letters: w
channels of a compressor's kv, d dims of an entry, r compress ratio, Hi heads of the indexer, Di dims of an index key,
E entries, n residual streams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dsv4attn.testing.oracle.attention import (
    E8M0_BIAS,
    E8M0_NAN,
    F64,
    U8,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    round_bf16,
    scale_exponent,
    unpack_e2m1,
)

E2M1_GROUP = 32  # OCP MX: values under one scale
E2M1_LARGEST = 6.0
E2M1_FLOOR = E2M1_LARGEST * 2.0**-126  # the floor vLLM puts under a group's largest magnitude in MXFP4


def state_row(kv: F64, score: F64, ape: F64, position: int) -> F64:
    """Return the state [2w] of a token: its kv [w], then its score [w] plus row `position % r` of ape [r, w].

    The sum is one float32 addition: float64 is wide enough for rounding twice to make no difference.
    """
    biased = np.asarray(score + ape[position % len(ape)], dtype=np.float32)
    return np.concatenate([kv, biased.astype(np.float64)])


def entry_window(entry: int, ratio: int, *, overlap: bool) -> list[tuple[int, int]]:
    """Return (position, half of the channels) of every token that counts in an entry.

    An entry covers its own `ratio` positions. With overlap these count by their second half of channels, and the
    positions of the entry before by their first half; entry 0 has none before it.
    """
    covered = range(entry * ratio, (entry + 1) * ratio)
    if not overlap:
        return [(position, 0) for position in covered]
    previous = range(max(entry - 1, 0) * ratio, entry * ratio)
    return [(position, 0) for position in previous] + [(position, 1) for position in covered]


def window_states(states: Mapping[int, F64], entry: int, ratio: int, *, overlap: bool) -> tuple[F64, F64]:
    """Return kv and scores [m, d] of an entry's window, from the states [2w] of a request by position."""
    kv, score = [], []
    for position, half in entry_window(entry, ratio, overlap=overlap):
        width = len(states[position]) // 2
        dim = width // 2 if overlap else width
        channels = slice(half * dim, (half + 1) * dim)
        kv.append(states[position][:width][channels])
        score.append(states[position][width:][channels])
    return np.stack(kv), np.stack(score)


def softmax(scores: F64) -> F64:
    """Return the softmax over the first dimension, channel by channel."""
    weights = np.exp(scores - scores.max(0))
    return np.asarray(weights / weights.sum(0))


def rms_norm(x: F64, weight: F64 | None, eps: float) -> F64:
    """Divide x [d] by the root of its mean square plus eps, and multiply by the weight [d]."""
    normed = x / math.sqrt(float(np.mean(x**2)) + eps)
    return normed if weight is None else normed * weight


def index_record_fp8(row: F64, *, fnuz: bool, floor: float, largest: float) -> U8:
    """Return the record of an index key [Di]: an e4m3 code for each dim, then one float32 scale, a power of two.

    The row is rounded to bf16 first. A NaN has the code NaN.
    """
    values = round_bf16(row)
    exponent = scale_exponent(float(np.nanmax(np.abs(np.append(values, 0.0)))), largest, floor)
    scale = np.array([math.ldexp(1.0, exponent)], dtype="<f4").view(np.uint8)
    return np.concatenate([encode_e4m3(np.ldexp(values, -exponent), fnuz), scale])


def index_record_fp4(row: F64) -> U8:
    """Return the record of an index key [Di]: e2m1 codes, two to a byte, then a scale byte for each group of 32.

    The row is rounded to bf16 first. A group that holds a NaN has the scale byte 255, as e2m1 has no NaN.
    """
    values, scales = round_bf16(row).reshape(-1, E2M1_GROUP), []
    codes = np.zeros(values.shape, dtype=np.uint8)
    for g, group in enumerate(values):
        if np.isnan(group).any():
            scales.append(E8M0_NAN)
            continue
        exponent = scale_exponent(float(np.abs(group).max()), E2M1_LARGEST, E2M1_FLOOR)
        codes[g] = encode_e2m1(np.ldexp(group, -exponent))
        scales.append(exponent + E8M0_BIAS)
    return np.concatenate([pack_e2m1(codes.reshape(-1)), np.array(scales, dtype=np.uint8)])


def read_index_fp8(record: U8, *, fnuz: bool) -> F64:
    """Return the key [Di] of a record with one float32 scale."""
    scale = np.ascontiguousarray(record[-4:]).view("<f4")[0]
    return np.asarray(decode_e4m3(record[:-4], fnuz) * np.float64(scale))


def read_index_fp4(record: U8) -> F64:
    """Return the key [Di] of a record of e2m1 codes: 16 bytes of codes and a scale byte for each group of 32."""
    groups = len(record) // (E2M1_GROUP // 2 + 1)
    return scaled_e2m1(unpack_e2m1(record[:-groups]), record[-groups:])


def scaled_e2m1(codes: U8, scales: U8) -> F64:
    """Return codes [..., Di] times 2**(byte - 127) of the scale bytes [..., Di / 32] of their groups."""
    return decode_e2m1(codes) * decode_e8m0(np.repeat(scales, E2M1_GROUP, axis=-1))


def fold_weights(weights: F64, dim: int, exponents: F64 | int) -> F64:
    """Return the weights [Hi] of the heads times 1 / sqrt(Di * Hi), and times the scale 2**e of each head's q."""
    return np.asarray(weights * 2.0 ** np.asarray(exponents, dtype=np.float64) / math.sqrt(dim * len(weights)))


def index_scores(q: F64, weights: F64, keys: F64) -> F64:
    """Return the scores [E] of keys [E, Di]: over the heads of q [Hi, Di], the sum of weight * max(0, q . k).

    A NaN in a key, in q or in the weights makes the score NaN.
    """
    return np.asarray(np.maximum(keys @ q.T, 0.0) @ weights)


def select(scores: F64, count: int) -> list[int]:
    """Return the entries with the `count` largest scores in ascending order: of equal scores the lower, never NaN."""
    entries = [e for e, score in enumerate(scores) if not math.isnan(score)]
    return sorted(sorted(entries, key=lambda e: (-scores[e], e))[:count])


def hc_mixes(streams: F64, fn: F64, eps: float) -> F64:
    """Return fn [m, n * d] times the streams [n, d] end to end, over the root of their mean square plus eps."""
    flat = streams.reshape(-1)
    return np.asarray(fn @ flat / math.sqrt(float(np.mean(flat**2)) + eps))


def sigmoid(x: F64) -> F64:
    """Return 1 / (1 + exp(-x)) without overflow."""
    decay = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, decay) / (1.0 + decay)


def sinkhorn(logits: F64, eps: float, repeat: int) -> F64:
    """Return logits [..., n, n] as a matrix that is nearly doubly stochastic.

    A softmax of each row, plus eps, then the columns divided by their sums plus eps; `repeat` - 1 times more rows, then
    columns.
    """
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    comb = weights / weights.sum(-1, keepdims=True) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return np.asarray(comb)


def hc_logits(mixes: F64, scale: F64, base: F64, parts: Sequence[int]) -> list[F64]:
    """Return consecutive parts of the mixes, each times its own scale, plus its part of the base."""
    logits, start = [], 0
    for size, factor in zip(parts, scale, strict=True):
        logits.append(mixes[start : start + size] * factor + base[start : start + size])
        start += size
    return logits


def hc_post(x: F64, residual: F64, post: F64, comb: F64) -> F64:
    """Return the new streams [n, d]: post[j] * x plus, over the streams i, comb[i, j] * residual[i]."""
    streams = range(len(residual))
    return np.stack([post[j] * x + sum(comb[i, j] * residual[i] for i in streams) for j in streams])


def collapse(streams: F64, previous_pre: F64 | None) -> F64:
    """Return the input [d] of a sublayer: the first of the streams [n, d], or all by the weights of the one before."""
    if previous_pre is None:
        return np.array(streams[0])
    return np.asarray(np.einsum("n,nd->d", previous_pre, streams))


def ring_rows(steps: list[range], ring: int) -> dict[int, int]:
    """Return the position that each row of a request's ring holds after some steps, by row."""
    held: dict[int, int] = {}
    for step in steps:
        for position in step:
            held[position % ring] = position
    return held


def block_scores(scores: F64, size: int) -> F64:
    """Return the largest score of each block of `size` entries, NaN left out; -inf where a block has no other."""
    filled = np.where(np.isnan(scores), -np.inf, scores)
    return np.array([filled[start : start + size].max() for start in range(0, len(scores), size)])


def inside_blocks(blocks: Sequence[int], size: int, count: int) -> NDArray[np.bool_]:
    """Return for each of `count` entries whether its block is one of those."""
    chosen = {*blocks}
    return np.array([entry // size in chosen for entry in range(count)], dtype=np.bool_)
