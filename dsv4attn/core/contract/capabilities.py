"""`Capabilities`, what a backend declares of its calls: its phases, and the forms of indices, keys and products."""

from __future__ import annotations

from enum import Enum

from attrs import frozen

__all__ = ["Capabilities", "IndexForm", "KeyForm", "Phase", "Products"]


class Phase(str, Enum):
    """Which of the two calls of a backend."""

    DECODE = "decode"
    PREFILL = "prefill"


class IndexForm(str, Enum):
    """How a backend takes the keys selected for each token."""

    DENSE = "dense"
    RAGGED = "ragged"


class Products(str, Enum):
    """What queries, and the weights of keys, are rounded to before they are multiplied.

    BF16: bf16, or fp32 where they are fp32. FP8: e4m3 with scales.
    """

    BF16 = "bf16"
    FP8 = "fp8"


class KeyForm(str, Enum):
    """Where a backend reads keys in prefill. In decode it always reads pages."""

    PAGED = "paged"
    GATHERED = "gathered"


@frozen
class Capabilities:
    """The forms in which a backend takes the indices and keys of its calls.

    decode_indices: how decode takes the keys selected for each token: a dense matrix, or a ragged list.
    prefill_indices: the same for prefill.
    prefill_keys: whether prefill reads pages or gathered rows. Decode always reads pages.
    prefill_pages: whether prefill takes pages too, where rows are its form. On layers of ratio 1, where a gather would
       hold the whole context, core then gathers nothing.
    index_alignment: columns of a gathered chunk's index matrix are rounded up to this.
    max_logits: whether `AttentionCall.max_logits` may be given. Without it, callers compute them beside the call.
    empty_lse: whether `AttentionCall.empty_lse` may differ from -inf. Without it, callers put another value there.
    products: the coarsest rounding that some call may have; the conformance kit's budgets follow it.
    """

    decode_indices: IndexForm = IndexForm.DENSE
    prefill_indices: IndexForm = IndexForm.DENSE
    prefill_keys: KeyForm = KeyForm.GATHERED
    index_alignment: int = 1
    max_logits: bool = False
    empty_lse: bool = False
    products: Products = Products.BF16
    prefill_pages: bool = False
