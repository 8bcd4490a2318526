"""A patched model on the device that is here, against transformers on the CPU in fp32."""

from __future__ import annotations

import copy

import pytest
import torch

from dsv4attn.core.contract.backend import Rank
from dsv4attn.core.contract.device import DeviceFacts
from tests.backends.built_in import infos, runs
from tests.integrations.paged import causal_model, chunked, generated, ids_of, left_padded, logits_of, patched
from tests.parity.hf import deviation

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = torch.device("cpu") if DEVICE is None else DEVICE
# the interpreter takes long for heads of 512 dims, and other tests have its backends
HERE = [name for name, info in infos().items() if runs(info, DeviceFacts.here(DEVICE))] if DEVICE.type != "cpu" else []
BOUND = {("fp32", torch.float32): 1e-2, ("bf16", torch.bfloat16): 0.1, ("fp8_ds_mla", torch.bfloat16): 0.15}
"""Largest deviation, relative to the largest logit. Products of fp32 may be in TF32, and other entries selected."""


# on a CPU other tests have fp32 and bf16 pages
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(*one, id=f"{one[0]}-{one[1]}", marks=[] if HERE or "fp8" in one[0] else pytest.mark.slow)
        for one in BOUND
    ],
)
@pytest.mark.parametrize("name", [None, *HERE])
def test_a_patched_model_on_this_device(name: str | None, layout: str, dtype: torch.dtype) -> None:
    if name is not None and infos()[name].rank is not Rank.REFERENCE:
        pytest.importorskip("triton", reason="needs Triton")
    model = causal_model(large=True)
    ids, short = ids_of(model, 400), ids_of(model, 150, 1)
    want = logits_of(model, ids)
    moved = copy.deepcopy(model).to(DEVICE, dtype)

    with patched(moved, name, kv_layout=layout, max_len=512) as handle:
        got = chunked(moved, ids.to(DEVICE), (250, 130, *[1] * 20))
        batch = {key: value.to(DEVICE) for key, value in left_padded(ids[:, :200], short).items()}
        tokens = generated(moved, 10, **batch)
        alone = generated(moved, 10, input_ids=short.to(DEVICE))
        assert handle.num_sequences == 0

    off = deviation(got.float().cpu(), want)
    print(f"{name} {layout} {off:.1e}, {int((tokens[1] == alone[0]).sum())} of 10 tokens as alone")
    assert off <= BOUND[layout, dtype]
    assert tokens.shape == (2, 10)
