"""`Limits`: the largest batch, in requests, tokens and bytes, that memory is planned for."""

from __future__ import annotations

from attrs import field, frozen, validators

from dsv4attn.core.argument_checks import at_least, is_flag, known_fields
from dsv4attn.errors import ArgumentError

__all__ = ["Limits"]

_positive = at_least(1)


@known_fields
@frozen
class Limits:
    """Upper bounds of every batch that will be run.

    max_num_reqs: most requests of a step. There may be more requests than tokens: those without a token count too.
    max_num_batched_tokens: most query tokens of a step, decode and prefill together.
    max_model_len: most tokens of a request, prompt and output.
    num_speculative_tokens: draft tokens verified per decode request. A request with at most one more query token is a
       decode.
    max_workspace_bytes: cap on the prefill arena of the workspace, in bytes; None is no cap. A smaller cap means more
       and smaller chunks, never another result.
    max_index_elements: cap on tokens x columns of the index matrix of one prefill chunk.
    decode_window_columns: most columns of `decode_swa_indices`; 0 is the model's window. If the tokens of a draft block
       see each other (`Batch.causal`), a row has the window and the block.
    prefill_window_columns: most columns of `prefill_swa_indices`; 0 is the model's window. An engine makes wider ones
       itself, for example for the tokens of an image, which see each other.
    single_phase: whether every request is a decode, with any number of query tokens. Where one deterministic backend
       serves decode and another serves prefill, or ranks share entries, a token's bits then do not depend on how its
       request is cut into steps. Long prompts are slower, and index tables larger.
    """

    max_num_reqs: int = field(validator=_positive)
    max_num_batched_tokens: int = field(validator=_positive)
    max_model_len: int = field(validator=_positive)
    num_speculative_tokens: int = field(default=0, validator=at_least(0))
    max_workspace_bytes: int | None = field(default=None, validator=validators.optional(at_least(0)))
    max_index_elements: int = field(default=2**21, validator=_positive)
    decode_window_columns: int = field(default=0, validator=at_least(0))
    prefill_window_columns: int = field(default=0, validator=at_least(0))
    single_phase: bool = field(default=False, validator=is_flag)

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < 1 + self.num_speculative_tokens:
            expected = f"at least the {1 + self.num_speculative_tokens} tokens of one decode request"
            raise ArgumentError("max_num_batched_tokens", expected=expected, actual=self.max_num_batched_tokens)

    @property
    def decode_threshold(self) -> int:
        """Most query tokens a decode request may have."""
        return self.max_num_batched_tokens if self.single_phase else 1 + self.num_speculative_tokens

    @property
    def max_decode_tokens(self) -> int:
        """Most query tokens all decode requests together may have."""
        return min(self.max_num_reqs * self.decode_threshold, self.max_num_batched_tokens)
