"""Arguments of the layer ops that always travel together: `TokenMap`, `StatePages` and `EntryNorm`."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache

__all__ = ["EntryNorm", "StatePages", "TokenMap"]

# no slots in classes with an instance a call: construction of frozen classes with slots takes twice as long


@frozen(slots=False, eq=False)
class TokenMap:
    """Which index keys each token of a step may select.

    block_table: [R, N] int32 - blocks of the cache of index keys: entry e of request i is in block_table[i, e // P], at
       place e % P, with P keys in a block. A block that is not in the cache does not exist, and has no entries.
    token_to_req: [T] int32 - the request of each token; -1 for a token that is not real.
    visible_lens: [T] int32 - the number of entries that each token sees; 0 for a token that is not real.
    """

    block_table: Tensor
    token_to_req: Tensor
    visible_lens: Tensor

    def tokens(self, part: slice) -> TokenMap:
        """The map of some of the tokens."""
        return TokenMap(self.block_table, self.token_to_req[part], self.visible_lens[part])


@frozen(slots=False, eq=False)
class StatePages:
    """The states of a compressor, and where those of each request are.

    cache: the state cache; its layout is `KVCacheLayout.compressor_state(w)`.
    block_table: [R, N] int32 - blocks of the state cache. In DeepSeek-V4 the state of position p of request i is in
       block_table[i, p // P], at place p % P, with P states in a block. In DeepSeek-V4.1 the N blocks of a request are
       a ring of N * P states, and position p is in row p % (N * P) of the ring.
    """

    cache: PagedKVCache
    block_table: Tensor


@frozen(slots=False, eq=False)
class EntryNorm:
    """What a row goes through before it is stored as an entry or as an index key: RMSNorm, then RoPE.

    weight: [d] fp32 or bf16 - weight of the norm. None: no norm, for keys of V4.1.
    eps: epsilon of the norm.
    cos_sin_cache: [positions, rope] fp32 - cosines, then sines, of each position.
    """

    weight: Tensor | None
    eps: float
    cos_sin_cache: Tensor
