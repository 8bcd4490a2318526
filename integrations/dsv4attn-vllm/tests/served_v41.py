"""A process with vLLM's own engine in it that serves DeepSeek-V4.1 on a CPU: see `main`.

vLLM has no V4.1 for CPUs. Its model for CUDA runs here, with these fakes next to those of served.py:
- The package takes the CPU for a GPU without DeepGEMM, for which it has layers of V4.1.
- Streams do nothing, and none is being captured.
- `torch.mm(..., out_dtype=)`, which CPUs lack, is a product in fp32.
- Hyper-connections are those of torch_mhc.py, because vLLM's need TileLang.
"""

from __future__ import annotations

import os
from typing import Any

import conftest  # noqa: F401 - Triton's interpreter and the variables of these tests
import served
import torch
from torch import Tensor

os.environ |= {"VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "0"}


def wide_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`torch.mm` with another dtype of its output."""
    return (a.float() @ b.float()).to(out_dtype)


def main(**arguments: Any) -> None:
    """`served.main`, of V4.1."""
    import torch_mhc
    from dsv4attn_vllm import replacements

    replacements.platform_name = lambda: "cuda"
    torch_mhc.install()
    torch.cuda.Stream = lambda *_, **__: None
    torch.cuda.is_current_stream_capturing = lambda: False
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", wide_product, "CPU")
    served.main(**arguments, limit_mm_per_prompt={"image": 0})
    library._destroy()
