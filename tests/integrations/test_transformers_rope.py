"""`patch` refuses a model of transformers that turns by other angles than DeepSeek-V4 with its configuration does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dsv4attn.errors import UnsupportedError
from tests.integrations.paged import chunked, ids_of, logits_of, new_model, patched
from tests.parity import hf
from tests.parity.hf import deviation

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")

MAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
COMPRESS = {**hf.yarn(original=256), "rope_theta": 160000.0, "partial_rotary_factor": 0.25, "attention_factor": 1.0}


def model_of(main: dict[str, Any], compress: dict[str, Any]) -> Any:
    """A model that transformers makes of nested parameters."""
    from transformers import DeepseekV4Config

    fields = hf.config().to_dict()
    fields["rope_parameters"] = {"main": dict(main), "compress": dict(compress)}
    fields["partial_rotary_factor"] = None
    fields.update(qk_rope_head_dim=hf.ROPE_DIM, attn_implementation="eager")
    return new_model(DeepseekV4Config(**fields))


def test_longer_cosines_by_default_are_refused() -> None:
    model = model_of(MAIN, {key: value for key, value in COMPRESS.items() if key != "attention_factor"})
    said = r"RoPE 'compress' .*a factor of 1, got 8 .*a factor of 1\.277 -> write .*attention_factor"
    with pytest.raises(UnsupportedError, match=said), patched(model):
        pass
    assert not hasattr(model, "dsv4attn")


@pytest.mark.parametrize(("table", "key", "value"), [("compress", "factor", 8), ("main", "rope_theta", 500.0)])
def test_a_configuration_that_was_changed_after_the_model_was_made_is_refused(table: str, key: str, value: Any) -> None:
    model = model_of(MAIN, COMPRESS)
    model.config.rope_parameters[table][key] = value
    with pytest.raises(UnsupportedError, match=f"RoPE {table!r} of the model: expected 8 .*got 8 "), patched(model):
        pass


@pytest.mark.parametrize("between", [torch.float16, torch.bfloat16])
def test_frequencies_that_a_cast_has_rounded_are_refused_with_both_numbers(between: torch.dtype) -> None:
    model = model_of(MAIN, COMPRESS).to(between).float()
    with pytest.raises(UnsupportedError, match=r"^RoPE frequencies 'main': ") as caught, patched(model):
        pass
    right, wrong = re.findall(r"0\.\d+", str(caught.value))
    assert right != wrong
    assert "for pair" in str(caught.value)
    assert "which was rounded by a cast -> load the model in the dtype that it runs in" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nested_parameters_that_say_all_are_served(dtype: torch.dtype) -> None:
    model = model_of({**MAIN, "rope_theta": 5000.0}, {**COMPRESS, "rope_theta": 40000.0}).to(dtype)
    ids = ids_of(model, 60)
    want = logits_of(model, ids)
    with patched(model):
        measured = deviation(chunked(model, ids, (23, 37)).float(), want.float())

    print(f"{measured:.1e}")
    assert measured <= (1e-5 if dtype == torch.float32 else 0.3)
