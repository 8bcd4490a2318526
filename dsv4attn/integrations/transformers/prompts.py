"""`check_prompt`: whether what `generate` is asked for fits the pages and continues the cache, before anything runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsv4attn.errors import ArgumentError


def check_prompt(generation_config: Any, mask: object, past: int, max_len: int) -> None:  # noqa: ANN401 - of transformers
    """Raise ArgumentError for a call of `generate` that would fail later, or answer a prompt without a token.

    generation_config: of the call; its `max_length` is known. mask: [N, P] - of all columns of the prompt, those in the
    cache included; None: no padding. past: columns in the cache. max_len: most tokens of a sequence. With a mask,
    numbers are read on the host once.
    """
    columns = getattr(
        generation_config, "_mask_length", None
    )  # transformers drops a mask of ones, and leaves its length
    tokens = []
    if isinstance(mask, Tensor) and mask.ndim == 2:
        columns, tokens = mask.shape[1], (mask != 0).sum(1).tolist()
    if columns is None:
        return
    if past and columns <= past:
        expected = f"the whole conversation with new tokens after it: the cache holds {past} tokens"
        hint = "give the whole conversation, crop the cache, or begin with a new one"
        raise ArgumentError("input_ids", expected=expected, actual=f"a prompt of {columns}", hint=hint)
    for row, count in enumerate(tokens):
        if not count and columns:
            hint = "leave this row out of the batch, or give it a token, such as that of the beginning"
            raise ArgumentError(f"attention_mask[{row}]", expected="a token", actual="padding only", hint=hint)
    longest, added = max(tokens, default=columns), generation_config.max_new_tokens
    if added is None:
        added = generation_config.max_length - columns
    # the last new token is not put into a cache
    if longest and longest + added - 1 > max_len:
        room = max_len + 1 - longest
        cure = f"pass max_new_tokens={room} at most, or " if room > 0 else ""
        expected, actual = (
            f"{longest + added - 1} or more",
            f"{max_len}: a prompt of {longest} tokens and {added} new ones",
        )
        hint = f"{cure}patch the model again with a larger max_len"
        raise ArgumentError("max_len", expected=expected, actual=actual, hint=hint)
