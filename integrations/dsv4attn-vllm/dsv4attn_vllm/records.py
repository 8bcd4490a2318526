"""DeepSeek-V4.1's own records, where vLLM would widen them to those of V4.

vLLM's layers ask one function whether windows have 528 bytes a token, and it says so on sm_100 alone, whose FlashMLA
reads them. `--kv-cache-dtype nvfp4_ds_mla` names these records with compressed ones of 288 bytes. With it, layers of
this package get the answer of sm_100 on every GPU of CUDA, while they are built and while they describe their caches.
Other layers of the process get vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.models.deepseek_v41 import attention as v41
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.models.deepseek_v41.attention import DeepseekV4IndexerCache as _IndexCache
else:
    _IndexCache = object

FP4_CACHE = "nvfp4_ds_mla"
"""The value of --kv-cache-dtype that names them."""


def are_of_v41(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Whether V4.1's own records are asked for by name. vLLM's layers for ROCm have other pages."""
    return vllm_config.cache_config.cache_dtype == FP4_CACHE and not current_platform.is_rocm()


@contextmanager
def v41_records(vllm_config: Any) -> Iterator[None]:  # noqa: ANN401 - as above
    """In the `with` statement vLLM takes V4.1's own records if they are asked for by name."""
    of_vllm = v41._use_v41_mxfp8_kv_record  # noqa: SLF001 - vLLM has no other name for it
    if are_of_v41(vllm_config):
        v41._use_v41_mxfp8_kv_record = lambda: True  # noqa: SLF001
    try:
        yield
    finally:
        v41._use_v41_mxfp8_kv_record = of_vllm  # noqa: SLF001


class InV41Pages(_IndexCache):
    """Goes before vLLM's class of a cache of index keys, whose pages lie next to those of the records."""

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:  # noqa: ANN401 - vLLM's KVCacheSpec
        """Return vLLM's description of the cache, with the alignment that pages of the records have."""
        with v41_records(vllm_config):
            return super().get_kv_cache_spec(vllm_config)


class V41IndexPages(InV41Pages, v41.DeepseekV4IndexerCache):
    """The cache of index keys next to V4.1's own records; its metadata are vLLM's."""
