"""What crosses the door between core and a backend: types, and nothing that runs.

A backend says as data which form of indices and keys it wants; core prepares exactly that and calls `decode` and
`prefill` with one `AttentionCall`. Semantics that every backend keeps, in both phases:

1. An index that is -1, outside the cache, or in a column at or past its length is absent, wherever it stands.
2. A row without keys gives exactly 0, and lse -inf, or what the call says instead.
3. The sink is one more logit with value zero, not scaled, applied once; -inf is no sink, +inf gives zeros.
4. `lse` is fp32, natural log, without the sink.
5. Bytes of a cache that no index names never reach an output, whatever they hold.
6. Addresses are computed in 64 bits.
7. A NaN in a key that a row names, be it a code, a scale byte or a plain value, makes the row's out, lse and largest
   logits NaN, in every head and dim. Writers write a NaN so that the key reads as NaN.
8. The last dimension of a tensor has stride 1; rows, and heads of q, o and out, may lie any distance apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from attrs import field, frozen

from dsv4attn.core.device import DeviceFacts
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.index_ops import BuilderSteps, IndexSteps, MetadataExtension, RaggedSteps
from dsv4attn.core.keys import DenseIndices, GatheredKeys, PagedKeys, PageTable, RaggedIndices
from dsv4attn.core.problem import Problem, Reason
from dsv4attn.errors import ArgumentError

if TYPE_CHECKING:
    # descriptors must load where torch is not wanted yet
    import torch
    from torch import Tensor

    from dsv4attn.core.geometry import ModelGeometry
    from dsv4attn.core.layout import PagedKVCache
    from dsv4attn.core.limits import Limits
    from dsv4attn.core.warmup_spec import Bounds
    from dsv4attn.core.workspace import BufferSpec

__all__ = [
    "API_VERSION",
    "AttentionCall",
    "Backend",
    "BackendInfo",
    "BuilderSteps",
    "CompiledBackend",
    "DenseIndices",
    "ExtendingBackend",
    "Forms",
    "GatheredKeys",
    "IndexForm",
    "IndexSteps",
    "KeyForm",
    "MetadataExtension",
    "PageTable",
    "PagedKeys",
    "Phase",
    "Products",
    "RaggedIndices",
    "RaggedSteps",
    "Rank",
]


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

    BF16: at least: what is fp32 may stay so. FP8: e4m3 with scales.
    """

    BF16 = "bf16"
    FP8 = "fp8"


class KeyForm(str, Enum):
    """Where a backend reads keys in prefill. In decode it always reads pages."""

    PAGED = "paged"
    GATHERED = "gathered"


@frozen
class Forms:
    """The choices in which backends differ. Core prepares the calls in the forms that a backend asks for.

    decode_indices: how decode takes the keys selected for each token: a dense matrix, or a ragged list.
    prefill_indices: the same for prefill.
    prefill_keys: whether prefill reads pages or gathered rows. Decode always reads pages.
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


# what is made in every call has no slots: frozen classes with slots take twice as long to make
@frozen(slots=False)
class AttentionCall:
    """One attention over selected keys, all segments in one softmax.

    layer: geometry of the layer.
    q: [T, H, D] bf16 or fp32 - normalised and rotated.
    keys: paged segments (window, then compressed if the layer has it), or gathered rows.
    attn_sink: [H] fp32 or None - one more logit per head, with value zero.
    out: [T, H, D] like q - written in full.
    lse: [T, H] fp32 or None - natural log, without the sink.
    scratch: the views this backend asked for.
    max_logits: [T, H] fp32 or None - the largest z of each row, -inf for rows without keys; given only to backends
       whose forms say so.
    empty_lse: what lse says of rows without keys.
    kept: where a backend may keep what follows from a call but for the addresses of q, attn_sink, out, lse and caches:
       calls that differ in these alone are given the same, as long as the memory of scratch stays. None: there is none.
    """

    layer: LayerGeometry
    q: Tensor
    keys: Sequence[PagedKeys] | GatheredKeys
    attn_sink: Tensor | None
    out: Tensor
    lse: Tensor | None
    scratch: Sequence[Tensor] = ()
    max_logits: Tensor | None = None
    empty_lse: float = -inf
    kept: dict[object, Any] | None = None


class Backend(Protocol):
    """What a device brings. Methods validate little: core has checked every argument before it calls."""

    name: str
    forms: Forms
    steps: IndexSteps

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Workspace views this backend needs to attend `tokens` rows of at most `width` keys.

        A function of its arguments: it is not asked again for equal ones.
        """

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """Upper bound in bytes of `scratch` over all smaller calls; need not be tight, must be true."""

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """Upper bound on temporaries of the framework's allocator in any one method; 0 for kernels.

        max_rows: most cache records that one gather or insert touches. `inv_rope_o_proj` is not part of it: its
        memory follows from weights that core never sees.
        """

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """Write k [T, D], bf16 or fp32, to the slots; k is already rotated.

        Slots that are negative or do not exist are skipped.
        """

    def qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        eps: float,
    ) -> None:
        """Normalise and rotate q [T, H, D] in place; rotate a copy of kv [T, D], which has q's dtype, and insert it.

        Rows at or past len(slot_mapping) have their q processed and nothing inserted.
        """

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        cache: PagedKVCache,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        offset: int,
    ) -> None:
        """out[i, offset + j] = record seq_lens[i] - gather_lens[i] + j of request i; all records if lens is None.

        out: [n, M, D] in the layout's row dtype; rows that receive no record keep what they hold. offset: at least 0. A
        record is absent, and its row not written, if its position is negative, or its column of the block table, or its
        row of out, does not exist: lengths may be any int32.
        """

    def decode(self, call: AttentionCall) -> None:
        """Attend over pages, few rows of any length."""

    def prefill(self, call: AttentionCall) -> None:
        """Attend over the keys this backend's `forms` ask for, many rows."""

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, num_groups: int
    ) -> Tensor:
        """Undo the rotation of o [T, H, D] at the query's position, then project each group of heads.

        wo_a: [G * rank, H / G * D], bf16 or fp32. Returns [T, G, rank] in the dtype of o.
        """


class ExtendingBackend(Backend, Protocol):
    """A backend with metadata of its own; `MetadataBuilder(backend=...)` asks for it."""

    def metadata_extension(self, geometry: ModelGeometry, limits: Limits, device: torch.device) -> MetadataExtension:
        """Allocate the buffers for every batch within the limits."""


class CompiledBackend(Backend, Protocol):
    """A backend whose kernels are compiled where they run: which ones can be known before the first call."""

    def kernel_variants(self, bounds: Bounds, device: DeviceFacts) -> Iterable[object]:
        """Every compiled form that calls within the bounds can ask for on such a device, which need not be here.

        Forms are hashable, and equal if they are compiled once.
        """

    def warmup(self, bounds: Bounds, device: torch.device) -> int:
        """Compile all of them for a device that is here, and return how many; afterwards no call compiles anything."""


class Rank(IntEnum):
    """Who goes first when several backends are native to a device."""

    REFERENCE = 0
    GENERIC = 1
    VENDOR = 2


API_VERSION = "1.0"
"""Version of this contract. A minor step only adds; a backend of another major version is refused."""


@frozen(kw_only=True)
class BackendInfo:
    """Descriptor of a backend, importable anywhere: neither torch nor triton nor a vendor's package is touched.

    name: what users write; unique among all backends.
    factory: `package.module:callable`, imported and called with the options once the backend has won.
    support: every reason why not, for a whole problem; empty means yes, and a yes never fails at launch.
    summary: one line for `dsv4attn backends`.
    native: kinds or archs, as shell patterns, on which it may be chosen automatically: ("sm_12*",).
    runs_on: where it can run when asked for by name; whatever is native, at least.
    rank: who goes first when several backends are native to a device.
    packages: distributions the implementation imports; missing ones make it unavailable.
    options: options the factory takes, with their defaults.
    notes: how it would serve a problem that it takes, a line each, for a backend that has several ways.
    api: version of the contract it was written for, written out: "1.0". A default would follow ours and say nothing.
    """

    name: str
    factory: str
    support: Callable[[DeviceFacts, Problem], Sequence[Reason]]
    summary: str
    native: tuple[str, ...]
    runs_on: tuple[str, ...] = ("*",)
    rank: Rank = Rank.VENDOR
    packages: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(factory=dict)
    notes: Callable[[DeviceFacts, Problem], Sequence[str]] | None = None
    api: str

    def __attrs_post_init__(self) -> None:
        """Check the types, as a descriptor comes from a stranger and is trusted from here on."""
        for name in ("name", "factory", "summary", "api"):
            if not isinstance(getattr(self, name), str):
                self._wrong(name, "a string")
        for name in ("native", "runs_on", "packages"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                self._wrong(name, "a tuple of strings")
        if not re.fullmatch(r"[\w.]+:\w+", self.factory):
            self._wrong("factory", "'package.module:callable'")
        if not callable(self.support):
            self._wrong("support", "a function")
        if self.notes is not None and not callable(self.notes):
            self._wrong("notes", "a function, or None")
        if not isinstance(self.rank, Rank):
            self._wrong("rank", "a Rank")
        if not isinstance(self.options, Mapping):
            self._wrong("options", "a dict")

    def _wrong(self, name: str, expected: str) -> NoReturn:
        raise ArgumentError(f"BackendInfo.{name}", expected=expected, actual=repr(getattr(self, name)))
