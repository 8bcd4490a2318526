"""Arguments of the layer ops that always travel together."""

from __future__ import annotations

from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.reprs import frozen

__all__ = ["EntryNorm", "MixWeights", "StatePages", "TokenMap"]

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
        """The map of some of the tokens.

        part: rows to keep.
        """
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


@frozen(eq=False)
class MixWeights:
    """Weights and constants of the mixes of one sublayer: the last argument of every op that makes mixes.

    Build it once for a layer. A new argument of these ops is one more field with a default. Letters: n streams,
    d hidden size, m = 2 n + n * n. The m mixes are pre (n), post (n) and comb (n * n), in this order.

    fn: [m, n * d] fp32 - makes the mixes from the flattened streams.
    hc_scale: [3] fp32 - factors of the products of pre, post and comb.
    hc_base: [m] fp32 - added to the scaled products.
    rms_eps: added to the mean square of the flattened streams, under the root.
    hc_pre_eps: added to each weight of a stream in pre.
    hc_sinkhorn_eps: added to comb after the softmax, and to each sum that Sinkhorn's iterations divide by.
    hc_post_mult_value: factor of post.
    sinkhorn_repeat: number of Sinkhorn's iterations. The first iteration normalises columns only.
    norm_weight: [d] bf16 or fp32 - weight of an RMSNorm of the input of the sublayer; None for no norm.
    norm_eps: epsilon of this norm.
    """

    fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    rms_eps: float
    hc_pre_eps: float
    hc_sinkhorn_eps: float
    hc_post_mult_value: float = 2.0
    sinkhorn_repeat: int = 20
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
