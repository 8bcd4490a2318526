"""The oracle: DeepSeek-V4 attention in float64 numpy, one row at a time.

The rest of the package is judged against this file, so the two share no code. Nothing here is fast; each loop follows
the written rule. Letters: H heads, D head dim, K keys, G output groups, R output rank.
A row is always ordered NoPE first, RoPE last; every size is a parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

MIN_AMAX = 1e-4  # the floor vLLM puts under a group's largest magnitude, so that empty groups have a scale
E8M0_BIAS = 127  # OCP MX: a scale byte b means 2 ** (b - 127)
E8M0_NAN = 255  # OCP MX: this byte is no scale at all
BF16_BITS = 8  # significand bits, the hidden one included
BF16_MIN_EXPONENT = -133  # the smallest subnormal is 2 ** -133
BF16_OVERFLOW = 2.0**128
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of the e2m1 codes 0 to 7; bit 3 is the sign


@functools.cache
def _e4m3_table(fnuz: bool) -> F64:  # noqa: FBT001
    """All 256 values: sign, 4 exponent bits, 3 mantissa bits; exponent field 0 is subnormal (OCP OFP8, FNUZ)."""
    bias = 8 if fnuz else 7
    table = np.empty(256)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        magnitude = math.ldexp(mantissa, -2 - bias) if exponent == 0 else math.ldexp(8 + mantissa, exponent - bias - 3)
        table[code] = -magnitude if sign else magnitude
    table[[0x80] if fnuz else [0x7F, 0xFF]] = math.nan
    table.flags.writeable = False
    return table


def decode_e4m3(codes: U8, fnuz: bool) -> F64:  # noqa: FBT001
    """Return the value of every code. OCP: bias 7, NaN 0x7F and 0xFF. FNUZ: bias 8, NaN 0x80 only, no -0."""
    return _e4m3_table(fnuz)[codes]


def encode_e4m3(x: F64, fnuz: bool) -> U8:  # noqa: FBT001
    """Return the nearest code, ties to the even one, beyond the largest value that value; NaN stays NaN.

    OCP keeps the sign of a zero, also of one that a tiny value was rounded to. FNUZ has only one zero.
    """
    magnitudes = _e4m3_table(fnuz)[: 0x80 if fnuz else 0x7F]  # codes of one sign are in order of size
    values = np.asarray(x, dtype=np.float64)
    codes = _nearest(np.where(np.isnan(values), 0.0, np.minimum(np.abs(values), magnitudes[-1])), magnitudes)
    signs = np.where(np.signbit(values) & ~(fnuz & (codes == 0)), 0x80, 0)
    return np.where(np.isnan(values), 0x80 if fnuz else 0x7F, codes | signs).astype(np.uint8)


def encode_e2m1(x: F64) -> U8:
    """Return the nearest e2m1 code, ties to the even one, beyond 6 that of 6; a zero keeps its sign."""
    values = np.asarray(x, dtype=np.float64)
    codes = _nearest(np.minimum(np.abs(values), E2M1_VALUES[-1]), E2M1_VALUES)
    return np.asarray(codes | np.where(np.signbit(values), 8, 0), dtype=np.uint8)


def decode_e2m1(codes: U8) -> F64:
    """Return the value of every code, one to a byte."""
    return np.asarray(np.where(codes & 8, -1.0, 1.0) * E2M1_VALUES[codes & 7])


def pack_e2m1(codes: U8) -> U8:
    """Put two codes into a byte, the even element in the low half."""
    return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4, dtype=np.uint8)


def unpack_e2m1(packed: U8) -> U8:
    """Undo `pack_e2m1`."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1).astype(np.uint8)


def _nearest(sizes: F64, magnitudes: F64) -> NDArray[np.int64]:
    """Return the number of the magnitude nearest to each size, ties to the even one; magnitudes are in order."""
    above = np.searchsorted(magnitudes, sizes)
    below = np.maximum(above - 1, 0)
    middle = (magnitudes[below] + magnitudes[above]) / 2
    return np.where((sizes > middle) | ((sizes == middle) & (above % 2 == 0)), above, below)


def round_bf16(x: ArrayLike) -> F64:
    """Round float64 to the nearest bf16, ties to even, in one step (through float32 it would be two).

    Scaled so that one unit is the last bf16 place, the value is rounded to an integer; both scalings are exact.
    """
    values = np.asarray(x, dtype=np.float64)
    exponents = np.maximum(np.frexp(values)[1] - BF16_BITS, BF16_MIN_EXPONENT)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(values, -exponents)), exponents)
    return np.where(np.abs(rounded) >= BF16_OVERFLOW, np.copysign(np.inf, values), rounded)


def bf16_bytes(values: F64) -> U8:
    """Return bf16 values, little endian: a bf16 is the upper half of its float32."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)


def read_bf16(data: U8) -> F64:
    """Undo `bf16_bytes`."""
    bits = np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64)


def decode_e8m0(codes: U8) -> F64:
    """Return the scale of every byte b, 2 ** (b - 127); 255 gives NaN (OCP MX)."""
    return np.where(codes == E8M0_NAN, np.nan, np.ldexp(1.0, codes.astype(np.int64) - E8M0_BIAS))


def scale_exponent(amax: float, largest: float, floor: float = MIN_AMAX) -> int:
    """Return the smallest e with max(amax, floor) <= largest * 2**e, clamped to [-127, 127] (vLLM rule).

    That is ceil(log2(amax / largest)), found by comparing mantissas instead of by a rounded division and log.
    largest: magnitude of the largest code.
    """
    if math.isinf(amax):
        return E8M0_NAN - 1 - E8M0_BIAS
    amax_mantissa, amax_exponent = math.frexp(max(amax, floor))
    max_mantissa, max_exponent = math.frexp(largest)
    exponent = amax_exponent - max_exponent + (amax_mantissa > max_mantissa)
    return min(max(exponent, -E8M0_BIAS), E8M0_NAN - 1 - E8M0_BIAS)


def quantize_record(row: F64, *, nope_dim: int, rope_dim: int, group_size: int, fnuz: bool, scale_bytes: int) -> U8:
    """Turn one row into the bytes of one cache record: NoPE codes, RoPE as bf16, scale bytes (vLLM rule).

    Everything is rounded to bf16 first. Each group of NoPE values (the last may be short) is divided by its own
    power of two, rounded to e4m3 and clamped; RoPE is stored little endian; scale bytes without a group are 0.
    """
    groups = -(-nope_dim // group_size)
    if row.shape != (nope_dim + rope_dim,) or groups > scale_bytes:
        msg = f"row {row.shape} needs {nope_dim} + {rope_dim} values and {groups} scales in {scale_bytes} bytes"
        raise ValueError(msg)
    values = round_bf16(row)
    if np.isnan(values[:nope_dim]).any():
        msg = "the rule gives no scale to a group that holds NaN"
        raise ValueError(msg)
    fp8_max = float(np.nanmax(_e4m3_table(fnuz)))
    exponents = np.zeros(groups, dtype=np.int64)
    for g in range(groups):
        part = slice(g * group_size, min((g + 1) * group_size, nope_dim))
        exponents[g] = scale_exponent(float(np.abs(values[part]).max()), fp8_max)
    scales = np.zeros(scale_bytes, dtype=np.uint8)
    scales[:groups] = exponents + E8M0_BIAS
    codes = encode_e4m3(np.ldexp(values[:nope_dim], -np.repeat(exponents, group_size)[:nope_dim]), fnuz)
    return np.concatenate([codes, bf16_bytes(values[nope_dim:]), scales])


def dequantize_record(
    record: U8, *, nope_dim: int, rope_dim: int, group_size: int, fnuz: bool, scale_bytes: int
) -> F64:
    """Read one record back: code * 2**(byte - 127) rounded to bf16, RoPE as it is; byte 255 gives NaN (OCP MX)."""
    rope_end = nope_dim + 2 * rope_dim
    if record.shape != (rope_end + scale_bytes,):
        msg = f"record {record.shape} is not {rope_end + scale_bytes} bytes"
        raise ValueError(msg)
    scales = decode_e8m0(np.repeat(record[rope_end:], group_size)[:nope_dim])
    nope = round_bf16(decode_e4m3(record[:nope_dim], fnuz) * scales)
    return np.concatenate([nope, read_bf16(record[nope_dim:rope_end])])


def dequantize_blocks(
    codes: U8,
    scale: F64 | U8,
    fnuz: bool,  # noqa: FBT001
    block: int = 128,
    *,
    exact: bool = False,
) -> F64:
    """Read a matrix of e4m3 codes with one scale per block: code * scale in float32, rounded to bf16 (vLLM's wo_a).

    codes [rows, columns], scale [ceil(rows / block), ceil(columns / block)]: factors, or bytes b for 2 ** (b - 127),
    where 255 gives NaN (OCP MX). The last block of a row or column of blocks may be short. exact: without rounding.
    """
    rows, columns = codes.shape
    if scale.shape != (-(-rows // block), -(-columns // block)):
        msg = f"scales {scale.shape} do not belong to a matrix {codes.shape} in blocks of {block}"
        raise ValueError(msg)
    factors = decode_e8m0(scale.astype(np.uint8)) if scale.dtype == np.uint8 else scale.astype(np.float64)
    of_values = np.repeat(np.repeat(factors, block, 0), block, 1)[:rows, :columns]
    values = decode_e4m3(codes, fnuz) * of_values
    return values if exact else round_bf16(values.astype(np.float32))


def round_runs(values: F64, run: int, fnuz: bool) -> F64:  # noqa: FBT001
    """Round outputs to e4m3 codes: each run of neighbours has the least power of two with which its largest fits."""
    runs, largest = values.reshape(-1, run), float(np.nanmax(_e4m3_table(fnuz)))
    exponents = np.array([scale_exponent(float(np.abs(each).max()), largest, 1e-10) for each in runs])[:, None]
    codes = encode_e4m3(np.ldexp(runs, -exponents), fnuz)
    return np.asarray(np.ldexp(decode_e4m3(codes, fnuz), exponents).reshape(values.shape))


@attrs.frozen
class Yarn:
    """YaRN of a compressed layer: its frequencies are stretched for long contexts, without magnitude scaling.

    factor: context length by the original one.
    original_max_position: positions of the original context.
    beta_fast: turns over the original context above which a pair stays unchanged.
    beta_slow: turns below which the frequency of a pair is divided by the factor.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def yarn_bounds(rope_dim: int, theta: float, yarn: Yarn) -> tuple[int, int]:
    """Return the pair numbers between which YaRN blends: a pair turns beta times over the original length."""

    def pair_number(turns: float) -> float:
        ratio = yarn.original_max_position / (2 * math.pi * turns)
        return rope_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = math.floor(pair_number(yarn.beta_fast)), math.ceil(pair_number(yarn.beta_slow))
    return max(low, 0), min(high, rope_dim - 1)


def rope_inv_freq(rope_dim: int, theta: float, yarn: Yarn | None) -> F32:
    """Return theta**(-2i/rope_dim) for every pair i, in float32 steps as vLLM and HF take them (power, inverse).

    With YaRN fast pairs are unchanged, slow ones divided by the factor, and those between the bounds blended linearly.
    """
    powers = np.power(theta, np.arange(0, rope_dim, 2) / rope_dim).astype(np.float32)
    unscaled: F32 = np.float32(1) / powers
    if yarn is None:
        return unscaled
    low, high = yarn_bounds(rope_dim, theta, yarn)
    width = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(rope_dim // 2, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    stretched = np.float32(1) / (np.float32(yarn.factor) * powers)
    return np.asarray(unscaled * (np.float32(1) - ramp) + stretched * ramp, dtype=np.float32)


def rope_cos_sin(position: int, inv_freq: F32) -> tuple[F64, F64]:
    """Return cos and sin of position * inv_freq. The angle is one float32 product (vLLM, HF), only then float64."""
    angles = (np.float32(position) * inv_freq.astype(np.float32)).astype(np.float64)
    return np.cos(angles), np.sin(angles)


def apply_rope(row: F64, cos: F64, sin: F64, rope_dim: int, inverse: bool = False) -> F64:  # noqa: FBT001, FBT002
    """Rotate neighbouring pairs (2i, 2i+1) of the TRAILING rope_dim values (GPT-J style); inverse turns back."""
    out = np.array(row, dtype=np.float64)
    start = out.shape[-1] - rope_dim
    even, odd = out[..., start::2].copy(), out[..., start + 1 :: 2].copy()
    turn = -sin if inverse else sin
    out[..., start::2] = even * cos - odd * turn
    out[..., start + 1 :: 2] = odd * cos + even * turn
    return out


def q_norm_rope(q: F64, cos: F64, sin: F64, rope_dim: int, eps: float | None) -> F64:
    """Divide each head of q [H, D] by its root mean square (no weight), then rotate it (vLLM; not yet rounded).

    Without eps the heads are rotated as they are (DeepSeek-V4.1).
    """
    heads = np.asarray(q, dtype=np.float64)
    if eps is not None:
        heads = np.stack([head / math.sqrt(np.mean(head**2) + eps) for head in heads])
    return apply_rope(heads, cos, sin, rope_dim)


def visible_keys(
    position: int,
    window: int,
    compress_ratio: int | None,
    selected: Sequence[int] | None,
    *,
    block: range | None = None,
    last: int | None = None,
    earliest: int = 0,
) -> tuple[list[int], list[int]]:
    """Return the window positions and the compressed entries which the query at `position` may see.

    The window ends at the query itself. Entry e exists once its last token, (e + 1) * ratio - 1, exists; the
    query may be that token. Without a ratio there are no entries. `selected` (an indexer's choice) narrows the
    entries and keeps its order.
    Other windows (vLLM): that of a draft `block` is the `window` positions before it and all of it, for each of its
    queries; that of a query in an image goes on to the position `last`; no window has a position before `earliest`.
    """
    first, end = (position - window + 1, position + 1) if block is None else (block.start - window, block.stop)
    positions = list(range(max(first, earliest, 0), end if last is None else last + 1))
    complete = 0 if compress_ratio is None else (position + 1) // compress_ratio
    entries = range(complete) if selected is None else selected
    return positions, [e for e in entries if 0 <= e < complete]


def apply_sink(out: F64, lse: F64, sink: F64 | None) -> F64:
    """Multiply each head of out [H, D] by sigmoid(lse - sink): one more logit whose value is zero (DeepSeek-V4).

    The sink is not scaled and not rotated. -inf changes nothing, +inf leaves zeros, a row without keys stays zero.
    """
    result = np.array(out, dtype=np.float64)
    for h, head_lse in enumerate(lse):
        if head_lse == -math.inf or (sink is not None and sink[h] == math.inf):
            result[h] = 0.0
        elif sink is not None:
            margin = float(head_lse - sink[h])
            decay = math.exp(-abs(margin))
            result[h] *= (1.0 if margin >= 0 else decay) / (1.0 + decay)
    return result


def attend_row(q: F64, keys: F64, sink: F64 | None, scale: float) -> tuple[F64, F64]:
    """Attend q [H, D] to keys [K, D], which are the values too; return out [H, D] and the natural lse [H].

    The lse leaves the sink out and is -inf when there is no key; out is then exactly 0 (FlashMLA's outputs).
    """
    queries, rows = np.asarray(q, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    out, lse = np.zeros(queries.shape), np.full(len(queries), -math.inf)
    for h in range(len(queries) if len(rows) else 0):
        logits = scale * (rows @ queries[h])
        largest = logits.max()
        weights = np.exp(logits - largest)
        lse[h] = largest + math.log(weights.sum())
        out[h] = (weights / weights.sum()) @ rows
    return apply_sink(out, lse, sink), lse


def inverse_rope_project(o: F64, cos: F64, sin: F64, rope_dim: int, wo_a: F64, wo_b: F64 | None) -> F64:
    """Turn o [H, D] back at the query's position, then apply the grouped output projection (vLLM, HF).

    wo_a [G, R, H / G * D] takes the neighbouring heads of its group end to end and gives z [G, R], returned when
    wo_b is None; otherwise wo_b [hidden, G * R] takes the groups of z end to end.
    """
    turned = apply_rope(o, cos, sin, rope_dim, inverse=True)
    heads = len(turned) // len(wo_a)
    z = np.stack([weight @ turned[g * heads : (g + 1) * heads].reshape(-1) for g, weight in enumerate(wo_a)])
    return z if wo_b is None else np.asarray(wo_b @ z.reshape(-1))


FP8_GROUP, FP4_GROUP = 32, 16
FP4_LEAST_SCALE = 2.0**-9  # the smallest e4m3fn number above zero


def record_fp8(row: F64, scale_floor: float = 0.0) -> U8:
    """Return codes of a row [D], then a byte for each group. scale_floor: 1e-4 is FlashMLA's rule, 0 is vLLM's."""
    values, codes, scales = round_bf16(row), list[U8](), []
    for start in range(0, len(row), FP8_GROUP):
        group = values[start : start + FP8_GROUP]
        exponent = scale_exponent(max(float(np.abs(group).max()), 448 * scale_floor), 448.0)
        codes.append(encode_e4m3(np.ldexp(group, -exponent), False))
        scales.append(exponent + E8M0_BIAS)
    return np.concatenate([*codes, np.array(scales, dtype=np.uint8)])


def read_fp8(record: U8, dim: int) -> F64:
    """Return [dim] values of a record, as bf16; scale byte 255 is NaN."""
    scale = decode_e8m0(np.repeat(record[dim:], FP8_GROUP)[:dim])
    return round_bf16(decode_e4m3(record[:dim], False) * scale)


def record_fp4(row: F64) -> U8:
    """Return packed codes of a row [D], then a scale byte for each group."""
    values = round_bf16(row)
    groups = [group_fp4(values[start : start + FP4_GROUP]) for start in range(0, len(row), FP4_GROUP)]
    codes = np.concatenate([codes for codes, _ in groups])
    return np.concatenate([pack_e2m1(codes), np.array([scale for _, scale in groups], dtype=np.uint8)])


def group_fp4(values: F64) -> tuple[U8, int]:
    """Return codes 0 to 15 of a group, and its scale byte: of a sixth of the largest magnitude, at least 2^-9."""
    byte = int(encode_e4m3(np.array(max(float(np.abs(values).max()) / 6, FP4_LEAST_SCALE)), False))
    return encode_e2m1(values / decode_e4m3(np.array(byte, dtype=np.uint8), False)), byte


def read_fp4(record: U8, dim: int) -> F64:
    """Return [dim] values of a record."""
    scales = np.repeat(decode_e4m3(record[dim // 2 :], False), FP4_GROUP)[:dim]
    return np.asarray(decode_e2m1(unpack_e2m1(record[: dim // 2])) * scales)


def record_nvfp4(row: F64, nope_dim: int) -> U8:
    """Return packed codes of the dims without RoPE, RoPE as bf16, then scale bytes, up to a multiple of 8 of them."""
    values, starts = round_bf16(row), range(0, nope_dim, FP4_GROUP)
    groups = [group_fp4(values[start : min(start + FP4_GROUP, nope_dim)]) for start in starts]
    scales = np.zeros(-(-len(groups) // 8) * 8, dtype=np.uint8)
    scales[: len(groups)] = [scale for _, scale in groups]
    codes = pack_e2m1(np.concatenate([codes for codes, _ in groups]))
    return np.concatenate([codes, bf16_bytes(values[nope_dim:]), scales])


def read_nvfp4(record: U8, nope_dim: int, rope_dim: int) -> F64:
    """Read one record of `record_nvfp4` back: code * scale, and RoPE as it is."""
    end = nope_dim // 2 + 2 * rope_dim
    scales = np.repeat(decode_e4m3(record[end:], False), FP4_GROUP)[:nope_dim]
    nope = decode_e2m1(unpack_e2m1(record[: nope_dim // 2])) * scales
    return np.concatenate([nope, read_bf16(record[nope_dim // 2 : end])])
