"""Which parts around attention run on dsv4attn instead of on SGLang's own kernels: `DSV4ATTN_SGLANG_PARTS`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attrs import frozen

from dsv4attn.integrations.engines import parts_named
from dsv4attn.integrations.variables import SGLANG_PARTS
from dsv4attn_sglang import records
from dsv4attn_sglang.guard import RefusedError

VARIABLE = SGLANG_PARTS
"""Parts by name, with commas between them; or `auto`, `all`, `none`. Unset is `auto`."""

INDEXER, GATHER = PARTS = ("indexer", "gather")
"""indexer: scores of index keys, selection, and their metadata. Queries and index keys stay SGLang's. gather: the keys
of a prompt are read from their pages."""

_VARIABLE = f"environment variable {VARIABLE}"


@frozen
class Device:
    """What the choice of parts depends on.

    sm: capability of a GPU of NVIDIA, as in 89; 0: another device. deep_gemm: whether DeepGEMM is installed and has
    kernels for this GPU, which is sm_90 or newer. other_scores: whether SGLang's variables choose scores in torch,
    TileLang or AITER instead. v41_records: see `records.are_asked_for`.
    """

    sm: int
    deep_gemm: bool
    other_scores: bool = False
    v41_records: bool = False

    @classmethod
    def here(cls) -> Device:
        """The device of this process."""
        from sglang.srt.environ import envs
        from sglang.srt.runtime_context import get_platform
        from sglang.srt.utils import is_cuda

        sm = get_platform().device_sm if is_cuda() else 0
        others = (
            envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH,
            envs.SGLANG_OPT_USE_AITER_INDEXER,
            envs.SGLANG_OPT_USE_TILELANG_INDEXER,
        )
        return cls(
            sm,
            deep_gemm=sm >= 90 and find_spec("deep_gemm") is not None,
            other_scores=any(variable.get() for variable in others),
            v41_records=records.are_asked_for(),
        )

    @property
    def lacking(self) -> frozenset[str]:
        """The parts for which SGLang has nothing that runs here."""
        if not self.sm:
            return frozenset()
        lacks_indexer = not self.deep_gemm and not self.other_scores
        # Triton has a type for e4m3 from sm_89 on
        return frozenset([INDEXER] * lacks_indexer + [GATHER] * (self.sm < 89 or self.v41_records))


def chosen(device: Device) -> frozenset[str]:
    """The parts that run on dsv4attn on a device.

    Raises RefusedError for a part that is not served there, and if one is left out that SGLang cannot run.
    """
    named = parts_named(VARIABLE, PARTS, RefusedError)
    parts, cure = device.lacking if named is None else named, f"leave {VARIABLE} out"
    if parts and not device.sm:
        raise RefusedError(_VARIABLE, expected="none on this device", actual=_text(parts), cure=cure)
    if not parts >= device.lacking:
        expected = f"{_text(device.lacking)}, which SGLang's own kernels cannot do on this GPU"
        raise RefusedError(_VARIABLE, expected=expected, actual=_text(parts) or "none", cure=cure)
    return parts


def _text(parts: frozenset[str]) -> str:
    return ",".join(part for part in PARTS if part in parts)


def check(runner: Any) -> None:  # noqa: ANN401 - SGLang's ModelRunner
    """Refuse what the indexer of dsv4attn does not serve in SGLang. runner: with its caches in place."""
    from sglang.srt.runtime_context import get_exec

    pool = runner.token_to_kv_pool
    if ratios := sorted({1, 2}.intersection(pool.present_ratios)):
        expected = f"layers of ratios 0, 4 and 128, for {INDEXER} on dsv4attn: DeepSeek-V4.1's indexer is another"
        cure = f"serve DeepSeek-V4, or use a GPU of sm_90 or newer without {VARIABLE}"
        raise RefusedError("model", expected=expected, actual=f"ratios {ratios}", cure=cure)
    if get_exec().kernel.enable_deepseek_v4_fp4_indexer:
        expected, cure = f"off, for {INDEXER} on dsv4attn", "start SGLang without it"
        raise RefusedError("--enable-deepseek-v4-fp4-indexer", expected=expected, actual="on", cure=cure)
    if runner.hisparse_coordinator is not None:
        expected, cure = f"off, for {INDEXER} on dsv4attn", "start SGLang without it"
        raise RefusedError("--enable-hisparse", expected=expected, actual="on", cure=cure)
