"""`Capabilities`: what a backend declares about its calls, in which forms it takes indices, keys and products."""

from __future__ import annotations

from enum import Enum

from attrs import frozen

__all__ = ["Capabilities", "IndexForm", "KeyForm", "Phase", "Products"]


class Phase(str, Enum):
    """The two kinds of calls of a backend."""

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
    prefill_pages: whether a backend with gathered rows takes pages in prefill too. On layers of ratio 1, where a gather
       would hold the whole context, core then gathers nothing.
    index_alignment: columns of a gathered chunk's index matrix are rounded up to a multiple of this number.
    max_logits: whether calls may ask for the largest logits. If not, callers compute them.
    empty_lse: whether calls may ask for another lse than -inf in rows without keys. If not, callers write it.
    products: the coarsest rounding of any call. The budgets of the conformance kit follow it.
    """

    decode_indices: IndexForm = IndexForm.DENSE
    prefill_indices: IndexForm = IndexForm.DENSE
    prefill_keys: KeyForm = KeyForm.GATHERED
    index_alignment: int = 1
    max_logits: bool = False
    empty_lse: bool = False
    products: Products = Products.BF16
    prefill_pages: bool = False
