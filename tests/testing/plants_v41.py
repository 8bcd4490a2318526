"""What goes wrong in planted bugs of DeepSeek-V4.1's steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.layer_ops import DELAYED, LATENTS

NEW = {*DELAYED, *LATENTS}
"""Names of the steps that V4 does not have."""


def own_pre(given: dict[str, Any]) -> Tensor:
    """The weights that the streams themselves have, as in V4."""
    rest = {**given, "previous_pre": None}
    return ReferenceBackend().layer_steps.mhc_pre_delayed(**rest)[0]


def own_pre_at_first(given: dict[str, Any]) -> Tensor:
    found = given["previous_pre"]
    return own_pre(given) if found is None else torch.as_tensor(found)


def mean_at_first(given: dict[str, Any]) -> Tensor:
    residual, found = given["residual"], given["previous_pre"]
    return torch.full(residual.shape[:2], 1 / residual.shape[1]) if found is None else torch.as_tensor(found)


def given_pre(made: tuple[Tensor, ...], given: dict[str, Any]) -> tuple[Tensor, ...]:
    return made if given["previous_pre"] is None else (given["previous_pre"], *made[1:])
