"""Which steps around attention run on dsv4attn instead of on SGLang's own kernels: `DSV4ATTN_SGLANG_STEPS`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attrs import frozen

from dsv4attn.integrations.engines import steps_named
from dsv4attn.integrations.variables import SGLANG_STEPS
from dsv4attn_sglang.guard import RefusedError

__all__ = ["INDEXER", "STEPS", "VARIABLE", "Device", "check", "chosen"]

VARIABLE = SGLANG_STEPS
"""Steps by name, with commas between them; or `auto`, `all`, `none`. Unset is `auto`."""

(INDEXER,) = STEPS = ("indexer",)
"""indexer: scores of index keys, selection, and their metadata. Queries and index keys stay SGLang's."""

_VARIABLE = f"environment variable {VARIABLE}"


@frozen
class Device:
    """What the choice of steps depends on.

    cuda: whether this is a GPU of NVIDIA. deep_gemm: whether DeepGEMM is installed and has kernels for this GPU, which
    is sm_90 or newer. other_scores: whether SGLang's variables choose scores in torch, TileLang or AITER instead.
    """

    cuda: bool
    deep_gemm: bool
    other_scores: bool = False

    @classmethod
    def here(cls) -> Device:
        """The device of this process."""
        from sglang.srt.environ import envs
        from sglang.srt.runtime_context import get_platform
        from sglang.srt.utils import is_cuda

        cuda = is_cuda()
        others = (
            envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH,
            envs.SGLANG_OPT_USE_AITER_INDEXER,
            envs.SGLANG_OPT_USE_TILELANG_INDEXER,
        )
        return cls(
            cuda,
            deep_gemm=cuda and get_platform().device_sm >= 90 and find_spec("deep_gemm") is not None,
            other_scores=any(variable.get() for variable in others),
        )

    @property
    def lacks_indexer(self) -> bool:
        """Whether SGLang's own indexer does not run here."""
        return self.cuda and not self.deep_gemm and not self.other_scores


def chosen(device: Device) -> frozenset[str]:
    """The steps that run on dsv4attn on a device.

    Raises RefusedError for a step that is not served there, and for none where SGLang's own does not run.
    """
    named = steps_named(VARIABLE, STEPS, RefusedError)
    steps = frozenset({INDEXER} if device.lacks_indexer else ()) if named is None else named
    if INDEXER in steps and not device.cuda:
        cure = f"leave {VARIABLE} out"
        raise RefusedError(_VARIABLE, expected="none on this device", actual=INDEXER, cure=cure)
    if device.lacks_indexer and INDEXER not in steps:
        expected, cure = "indexer, as SGLang's needs DeepGEMM", f"leave {VARIABLE} out"
        raise RefusedError(_VARIABLE, expected=expected, actual="none", cure=cure)
    return steps


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
