"""Codecs: groups of values to codes under scales, and back, in torch. `CODECS` has one for each `Coding`.

FP8: a scale is the smallest power of two with amax / scale <= the largest code, where amax is at least the layout's
floor. vLLM's and FlashMLA's writers do so. NVFP4: see `core.cache.fp4`. MXFP4: e2m1 codes under a power of two that
follows the rule of FP8, with 6 as the largest code; so vLLM, SGLang and transformers quantise index keys of MXFP4.

For `v4_nvfp4` this is our definition of the writer, and readers do not depend on it. FlashInfer 0.7.2.post1
(`sparse_mla_sm120/dsv4_nvfp4_cache_ops.cu`) has the same scale, but 0 where amax / 6 is at most 2^-10, so that the
group is lost. There and below, ours is 2^-9. Its codes are those of value * (1 / scale) in fp32. Ours are those of the
quotient, so that a few values between two codes go to the other one. A group that holds a NaN has a number for a scale
there; here it is NaN, and so is the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4attn.core.cache import fp4
from dsv4attn.core.cache.record_layout import Coding, KVCacheLayout
from dsv4attn.core.model.weight_scales import power_of_two
from dsv4attn.core.reprs import frozen

__all__ = ["CODECS", "LARGEST_EXPONENT", "NAN_EXPONENT", "Codec", "dequantize_keys", "power_of_two", "quantize_keys"]

LARGEST_EXPONENT, NAN_EXPONENT = 254, 255
"""Scale bytes: the largest that is a number, and the one that is none."""


@frozen
class Codec:
    """A packer and a decoder.

    quantize: values [..., dims] of any float dtype, rounded to bf16 first, to codes [..., dims * bits / 8] uint8 and
       scale bytes [..., groups] uint8. The last group may be short.
    dequantize: see `dequantize_keys`.
    """

    quantize: Callable[[Tensor, KVCacheLayout], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor, KVCacheLayout], Tensor]


def quantize_keys(values: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
    """Coded parts [..., dims] to codes [..., code_bytes] and scale bytes [..., scale_bytes], uint8; pad bytes are 0."""
    codes, scales = CODECS[layout.coding].quantize(values, layout)
    return codes, pad(scales, (0, layout.scale_bytes - layout.num_groups))


def dequantize_keys(codes: Tensor, scales: Tensor, layout: KVCacheLayout) -> Tensor:
    """[..., dims] fp32 of codes [..., code_bytes] uint8 and scales [..., at least groups]; exact.

    scales: exponents of any integer dtype; of fp8, fp32 scales too.
    """
    return CODECS[layout.coding].dequantize(codes, scales, layout)


def _scaled(values: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of values [..., dims], biased exponents of their scales, and the values over the scales.

    Groups are [..., groups, group] fp32, the last one with zeros at its end, and exponents [..., groups] int32. An
    exponent is read off the bits of amax / largest code: biased exponent, plus one unless the mantissa is zero. No
    logarithm, so no device rounds it differently.
    """
    dims = values.shape[-1]
    groups = pad(values.bfloat16().float(), (0, -dims % layout.group_size)).unflatten(-1, (-1, layout.group_size))
    amax = groups.abs().amax(-1).clamp(min=layout.amax_floor)
    bits = (amax / layout.fp8_max).view(torch.int32)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(0, LARGEST_EXPONENT)
    return groups, exponent, (groups * power_of_two(254 - exponent)[..., None]).flatten(-2)[..., :dims]


def _quantize_fp8(values: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
    assert layout.fp8_format is not None
    _, exponent, scaled = _scaled(values, layout)
    codes = scaled.clamp(-layout.fp8_max, layout.fp8_max).to(layout.fp8_format.dtype).view(torch.uint8)
    return codes, exponent.to(torch.uint8)


def _dequantize_fp8(codes: Tensor, scales: Tensor, layout: KVCacheLayout) -> Tensor:
    assert layout.fp8_format is not None
    scale, values = scales[..., : layout.num_groups], codes.view(layout.fp8_format.dtype).float()
    if scale.dtype != torch.float32:
        scale = power_of_two(scale)
    whole = values.shape[-1] // layout.group_size
    end = whole * layout.group_size
    values[..., :end].unflatten(-1, (whole, layout.group_size)).mul_(scale[..., :whole, None])
    values[..., end:].mul_(scale[..., whole:])  # the last group may be short
    return values


def _quantize_mxfp4(values: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
    groups, exponent, scaled = _scaled(values, layout)
    # e2m1 has no NaN: the scale of the group is NaN instead
    exponent = exponent.masked_fill(groups.isnan().any(-1), NAN_EXPONENT)
    return _packed(scaled), exponent.to(torch.uint8)


def _packed(values: Tensor) -> Tensor:
    """Scaled values [..., dims] as e2m1, two to a byte: [..., dims / 2] uint8. To nearest, ties to even, saturating.

    A negative value that is rounded to zero keeps its sign; a negative zero does not.
    """
    return fp4.pack(fp4.codes_of(values.abs()) | (values < 0).to(torch.uint8) << 3)


def _dequantize_mxfp4(codes: Tensor, scales: Tensor, layout: KVCacheLayout) -> Tensor:
    return fp4.decode(codes, power_of_two(scales[..., : layout.num_groups]), layout.group_size)


CODECS: Mapping[Coding, Codec] = {
    Coding.FP8: Codec(_quantize_fp8, _dequantize_fp8),
    Coding.NVFP4: Codec(lambda values, _: fp4.quantize(values), lambda codes, scales, _: fp4.dequantize(codes, scales)),
    Coding.MXFP4: Codec(_quantize_mxfp4, _dequantize_mxfp4),
}
"""A codec for each coding."""
