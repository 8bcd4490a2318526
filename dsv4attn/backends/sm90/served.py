"""What the Gluon kernels for Hopper serve: facts in, the keys that they read or every reason out. Needs no torch.

The launcher `launch`, the key formats of `attention.key_format` and the notes of `explain` read this file. `support` of
the backend does not: the shared kernels serve what the Gluon kernels refuse. What depends on tensors alone, as
alignment does, is in `launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.layer_geometry import LayerGeometry

MOST_HEADS = 128
"""Most heads of a layer. More heads take more than two blocks of 64, which has not been tested."""
MOST_TOPK = 1024
"""Most entries that the kernels for Hopper select."""
DIM = 512
"""Dims of a key."""
_V4_DIMS = 448, 64
"""Dims of a key of V4's records that are codes, and that are bf16 values."""


class KeyKind(str, Enum):
    """Keys that a Gluon kernel reads, see `kernels_schedule`."""

    FP8 = "fp8_ds_mla"
    NVFP4 = "v4_nvfp4"
    CODES = "v41_fp8"
    NIBBLES = "v41_fp8 and v41_fp4"
    ROWS = "bf16 rows"


class Keys(NamedTuple):
    """The keys of a call. interleaved: whether the scales of a record follow its data."""

    kind: KeyKind
    interleaved: bool = False


_FP8, _NVFP4 = ("fp8_ds_mla", "e4m3fn", 64), ("v4_nvfp4", "e2m1", 16)
_CODES, _NIBBLES = ("v41_fp8", "e4m3fn", 32), ("v41_fp4", "e2m1", 16)
"""Layout, element type and group of a record."""
_V4 = {_FP8: KeyKind.FP8, _NVFP4: KeyKind.NVFP4}
_KINDS: dict[tuple[tuple[str, str, int], ...], KeyKind] = {
    **{records: kind for record, kind in _V4.items() for records in ((record,), (record, record))},
    **dict.fromkeys(((_CODES,), (_CODES, _CODES)), KeyKind.CODES),
    (_CODES, _NIBBLES): KeyKind.NIBBLES,
}
"""By the records of the window cache, and of the compressed cache of layers that have one."""


def against(problem: Problem) -> Sequence[str]:
    """Every reason why the Gluon kernels do not serve a problem."""
    reasons = [] if problem.q_dtype == "bfloat16" else [f"q is {problem.q_dtype}, not bfloat16"]
    reasons += against_layer(problem.layer)
    caches = [cache for cache in (problem.swa, problem.compressed) if cache is not None]
    keys = keys_of(caches, (problem.layer.nope_dim, problem.layer.rope_dim))
    if isinstance(keys, str):
        reasons.append(keys)
    return list(dict.fromkeys(reasons))


def against_layer(layer: LayerGeometry) -> Sequence[str]:
    """Every reason why the Gluon kernels serve no call of a layer."""
    reasons = []
    if layer.head_dim != DIM:
        reasons.append(_of_dims(layer.nope_dim, layer.rope_dim))
    if layer.num_heads > MOST_HEADS:
        reasons.append(f"{layer.num_heads} heads, more than {MOST_HEADS}")
    return reasons


def keys_of(caches: Sequence[CacheFacts], dims: tuple[int, int]) -> Keys | str:
    """The keys of a call on caches, or of a call on rows as if they were a cache; or why no Gluon kernel reads them.

    caches: the window cache, and the compressed cache of layers that have one.
    dims: of a key, those without position and those with.
    """
    if [(cache.layout, cache.dtype) for cache in caches] == [("rows", "bfloat16")]:
        return Keys(KeyKind.ROWS) if sum(dims) == DIM else _of_dims(*dims)
    records = tuple((cache.layout, cache.dtype, cache.group_size) for cache in caches)
    kind, arrangements = _KINDS.get(records), {cache.arrangement for cache in caches}
    if kind is None:
        others = "nor v4_nvfp4 or v41_fp8, nor v41_fp8 and v41_fp4"
        return f"caches that are not all fp8_ds_mla of e4m3fn, {others}"
    is_v4, interleaved = records[0] in _V4, "interleaved" in arrangements
    if len(arrangements) > 1 or (is_v4 and interleaved):
        return "scales elsewhere: expected after the page's records in fp8_ds_mla, and alike in V4.1's two caches"
    if sum(dims) != DIM or (is_v4 and dims != _V4_DIMS):
        return _of_dims(*dims)
    return Keys(kind, interleaved)


def _of_dims(nope: int, rope: int) -> str:
    return f"keys of {nope} + {rope} dims, not {_V4_DIMS[0]} + {_V4_DIMS[1]}"
