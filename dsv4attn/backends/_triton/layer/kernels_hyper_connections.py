"""Kernels of the hyper-connections: products of streams with their mixes, Sinkhorn's iterations, weighed sums.

The product of a token's streams with fn is a matrix product, cut into splits of their columns. A second kernel adds the
splits and makes post, comb and the weighed sum of them. All sums are fp32, in an order that the constants and the run
of a split determine: never the other tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import round_to

READ_ONCE = tl.constexpr("evict_first")
"""Policy for what is not read again soon, so that the cache keeps the new streams until they are mixed."""


@triton.jit
def upper_half(x):
    """Upper half of the bits of fp32 x: the bf16 number next to it, towards zero."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def split_factors(factors, IN_BF16: tl.constexpr):
    """Factors, fp32, as a sum of three bf16 numbers of 8 bits each, the smallest first; or as they are."""
    if IN_BF16:
        high = upper_half(factors)
        rest = factors - high.to(tl.float32)
        middle = upper_half(rest)
        parts = (upper_half(rest - middle.to(tl.float32)), middle, high)
    else:
        parts = (factors,)
    return parts


@triton.jit
def load_factors(
    FN, fn_stride, k, N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, BLOCK_C: tl.constexpr,
    FN_ALIGNED: tl.constexpr, IN_BF16: tl.constexpr,
):  # fmt: skip
    """Factors [K, C] of columns k of N streams, at the first of which FN points: in parts, for each stream."""
    mix = tl.arange(0, BLOCK_C)
    live = (mix < MIXES)[None, :] & (k < HIDDEN)[:, None]
    factors = ()
    for j in tl.static_range(N):
        at = tl.multiple_of(FN + j * HIDDEN + mix.to(tl.int64) * fn_stride, FN_ALIGNED)[None, :] + k[:, None]
        factors += (split_factors(tl.load(at, mask=live, other=0.0), IN_BF16),)
    return factors


@triton.jit
def add_product(acc, tile, parts, IN_BF16: tl.constexpr):
    """Acc [M, C] plus a tile of streams [M, K] times factors [K, C] in parts, with fp32's precision.

    bf16 holds the streams, and fp32 the products of two bf16 numbers.
    """
    if IN_BF16:
        for i in tl.static_range(3):
            acc = tl.dot(tile, parts[i], acc)
    else:
        acc = tl.dot(tile.to(tl.float32), parts[0], acc, input_precision="ieee")
    return acc


@triton.jit
def load_rows(
    START, row, k, HIDDEN: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    """Columns k of rows [M], which begin `row` elements behind START and at multiples of ALIGNED bytes: [M, K].

    POLICY: of the cache.
    """
    # the compiler forgets an alignment that is not that of a sum
    at = tl.multiple_of(START + row, ALIGNED)[:, None] + k[None, :]
    if MASKED:
        rows = tl.load(at, mask=(k < HIDDEN)[None, :], other=0.0, eviction_policy=POLICY)
    else:
        rows = tl.load(at, eviction_policy=POLICY)
    return rows


@triton.jit
def new_streams(
    X, STREAMS, POST, COMB, token, k, x_stride, token_stride, stream_stride, post_stride, weight_stride, comb_stride,
    mix_stride, N: tl.constexpr, HIDDEN: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Columns k of the N new streams of tokens [M]: fp32 [M, K] each."""
    # [M, 1] each
    posts, combs = (), ()
    for j in tl.static_range(N):
        posts += (tl.load(POST + (token * post_stride + j * weight_stride))[:, None],)
        for i in tl.static_range(N):
            combs += (tl.load(COMB + (token * comb_stride + (i * mix_stride + j)))[:, None],)
    x = load_rows(X, token * x_stride, k, HIDDEN, ALIGNED, MASKED, READ_ONCE)
    news = ()
    for j in tl.static_range(N):
        news += (posts[j] * x.to(tl.float32),)
    # one old stream after another, so that few of them are in registers
    for i in tl.static_range(N):
        row = token * token_stride + i * stream_stride
        old = load_rows(STREAMS, row, k, HIDDEN, ALIGNED, MASKED, READ_ONCE)
        sums = ()
        for j in tl.static_range(N):
            sums += (news[j] + combs[j * N + i] * old.to(tl.float32),)
        news = sums
    return news


@triton.jit
def first_of(a, b):
    """Return a."""
    return a


@triton.jit
def made_once(x, COMPILED: tl.constexpr):
    """X as it is, by a reduction, which the compiler does not repeat in another layout.

    A tile that is both stored and multiplied would be computed twice. COMPILED: false in the interpreter.
    """
    if COMPILED:
        x = tl.reduce(tl.join(x, x), 2, first_of)
    return x


@triton.jit
def store_products(PRODUCTS, m, count, splits, split, acc, squares, N: tl.constexpr, MIXES: tl.constexpr):
    """Write a split's products [M, C] and sums of squares [M, K] of rows m: products of pre, squares, other products.

    Rows are multiples of 32 bytes, and what `make_sum` reads of them is together.
    """
    width: tl.constexpr = triton.cdiv(MIXES + 1, 8) * 8
    row = PRODUCTS + (m.to(tl.int64) * splits + split) * width
    mix = tl.arange(0, acc.shape[1])
    column = tl.where(mix < N, mix, mix + 1)
    tl.store(row[:, None] + column[None, :], acc, mask=(m < count)[:, None] & (mix < MIXES)[None, :])
    tl.store(row + N, tl.sum(squares, 1), mask=m < count)


@stable_kernel
def products_kernel(
    STREAMS,  # [tokens, N, HIDDEN]
    FN,  # [MIXES, N * HIDDEN] fp32
    PRODUCTS,  # [end - first, splits, WIDTH] fp32
    first: tl.int32, end: tl.int32, groups: tl.int32,
    token_stride: tl.int64, stream_stride: tl.int64, fn_stride: tl.int64,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr,
    ALIGNED: tl.constexpr, FN_ALIGNED: tl.constexpr, IN_BF16: tl.constexpr,
):  # fmt: skip
    """Grid: (groups * splits,): products of tokens first .. end with fn, and sums of squares, of BLOCK_K columns.

    Of each stream, that is. The programs of a split share its token tiles. HELD: whether the factors stay in shared
    memory; otherwise they are loaded for each tile. ALIGNED, FN_ALIGNED: bytes that divide the address of every row of
    the streams, and of a stream's columns in every row of fn.
    """
    splits: tl.constexpr = triton.cdiv(HIDDEN, BLOCK_K)
    masked: tl.constexpr = HIDDEN % BLOCK_K != 0
    split = tl.program_id(0) % splits
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    held = load_factors(FN, fn_stride, k, N if HELD else 0, HIDDEN, MIXES, BLOCK_C, FN_ALIGNED, IN_BF16)
    for start in tl.range(tl.program_id(0) // splits * BLOCK_M, end - first, groups * BLOCK_M, num_stages=STAGES):
        m = start + tl.arange(0, BLOCK_M)
        # tokens past the end are the last one again, which costs less than a mask
        token = tl.minimum(first + m, end - 1).to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for j in tl.static_range(N):
            row = token * token_stride + j * stream_stride
            tile = load_rows(STREAMS, row, k, HIDDEN, ALIGNED, masked, "")
            if HELD:
                acc = add_product(acc, tile, held[j], IN_BF16)
            else:
                columns = FN + j * HIDDEN
                factors = load_factors(columns, fn_stride, k, 1, HIDDEN, MIXES, BLOCK_C, FN_ALIGNED, IN_BF16)
                acc = add_product(acc, tile, factors[0], IN_BF16)
            wide = tile.to(tl.float32)
            squares += wide * wide
        store_products(PRODUCTS, m, end - first, splits, split, acc, squares, N, MIXES)


@stable_kernel
def post_products_kernel(
    X,  # [tokens, HIDDEN]
    STREAMS,  # [tokens, N, HIDDEN]
    POST,  # [tokens, N] fp32
    COMB,  # [tokens, N, N] fp32
    FN,  # [MIXES, N * HIDDEN] fp32
    OUT,  # [tokens, N, HIDDEN], dense
    PRODUCTS,  # [end - first, splits, WIDTH] fp32
    first: tl.int32, end: tl.int32, groups: tl.int32,
    x_stride: tl.int64, token_stride: tl.int64, stream_stride: tl.int64, post_stride: tl.int64, weight_stride: tl.int64,
    comb_stride: tl.int64, mix_stride: tl.int64, fn_stride: tl.int64,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr,
    ALIGNED: tl.constexpr, FN_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, IN_BF16: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (groups * splits,): new streams of tokens first .. end, and what `products_kernel` makes of these.

    ALIGNED: bytes that divide the address of every row of x and of the streams. OUT_ALIGNED: of the new streams.
    """
    splits: tl.constexpr = triton.cdiv(HIDDEN, BLOCK_K)
    masked: tl.constexpr = HIDDEN % BLOCK_K != 0
    split = tl.program_id(0) % splits
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k < HIDDEN)[None, :]
    held = load_factors(FN, fn_stride, k, N if HELD else 0, HIDDEN, MIXES, BLOCK_C, FN_ALIGNED, IN_BF16)
    for start in tl.range(tl.program_id(0) // splits * BLOCK_M, end - first, groups * BLOCK_M, num_stages=STAGES):
        m = start + tl.arange(0, BLOCK_M)
        live = (first + m < end)[:, None]
        token = tl.minimum(first + m, end - 1).to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        news = new_streams(
            X, STREAMS, POST, COMB, token, k, x_stride, token_stride, stream_stride, post_stride, weight_stride,
            comb_stride, mix_stride, N, HIDDEN, ALIGNED, masked,
        )  # fmt: skip
        for j in tl.static_range(N):
            new = made_once(news[j], EXACT_CASTS)
            tile = round_to(new, OUT.dtype.element_ty, EXACT_CASTS)
            at = tl.multiple_of(OUT + (token * N + j) * HIDDEN, OUT_ALIGNED)[:, None] + k[None, :]
            tl.store(at, tile, mask=live & inside if masked else live)
            if HELD:
                acc = add_product(acc, tile, held[j], IN_BF16)
            else:
                columns = FN + j * HIDDEN
                factors = load_factors(columns, fn_stride, k, 1, HIDDEN, MIXES, BLOCK_C, FN_ALIGNED, IN_BF16)
                acc = add_product(acc, tile, factors[0], IN_BF16)
            wide = tile.to(tl.float32)
            squares += wide * wide
        store_products(PRODUCTS, m, end - first, splits, split, acc, squares, N, MIXES)


@stable_kernel
def post_kernel(
    X,  # [tokens, HIDDEN]
    STREAMS,  # [tokens, N, HIDDEN]
    POST,  # [tokens, N] fp32
    COMB,  # [tokens, N, N] fp32
    OUT,  # [tokens, N, HIDDEN], dense
    tokens: tl.int32, x_stride: tl.int64, token_stride: tl.int64, stream_stride: tl.int64, post_stride: tl.int64,
    weight_stride: tl.int64, comb_stride: tl.int64, mix_stride: tl.int64,
    N: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (token tiles * blocks,): BLOCK columns of the new streams of BLOCK_M tokens."""
    blocks: tl.constexpr = triton.cdiv(HIDDEN, BLOCK)
    masked: tl.constexpr = HIDDEN % BLOCK != 0
    m = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.minimum(m, tokens - 1).to(tl.int64)
    k = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    news = new_streams(
        X, STREAMS, POST, COMB, token, k, x_stride, token_stride, stream_stride, post_stride, weight_stride,
        comb_stride, mix_stride, N, HIDDEN, ALIGNED, masked,
    )  # fmt: skip
    for j in tl.static_range(N):
        at = tl.multiple_of(OUT + (token * N + j) * HIDDEN, OUT_ALIGNED)[:, None] + k[None, :]
        live = (m < tokens)[:, None] & (k < HIDDEN)[None, :]
        tl.store(at, round_to(news[j], OUT.dtype.element_ty, EXACT_CASTS), mask=live)


@triton.jit
def add_splits(PRODUCTS, row, column, SPLITS: tl.constexpr, MIXES: tl.constexpr, BLOCK_S: tl.constexpr):
    """[R, C] fp32: sums over the splits of columns [C] of rows [R]."""
    width: tl.constexpr = triton.cdiv(MIXES + 1, 8) * 8
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, SPLITS, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        part = PRODUCTS + (row.to(tl.int64)[:, None] * SPLITS + split[None, :]) * width
        live = (split < SPLITS)[None, :, None]
        total += tl.sum(tl.load(part[:, :, None] + column[None, None, :], mask=live, other=0.0), 1)
    return total


@triton.jit
def inverse_root(
    PRODUCTS, row, eps, N: tl.constexpr, HIDDEN: tl.constexpr, SPLITS: tl.constexpr, MIXES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """[R, 1] fp32: 1 / the root of the mean square of the streams of rows [R]."""
    square = add_splits(PRODUCTS, row, N + tl.arange(0, 1), SPLITS, MIXES, BLOCK_S)
    return tl.rsqrt(square / (N * HIDDEN) + eps)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def share(comb, axis: tl.constexpr, eps, inside):
    """Comb [R, P, P] over its sums along an axis, plus eps; 0 outside."""
    return tl.where(inside, comb / (tl.sum(comb, axis, keep_dims=True) + eps), 0.0)


@triton.jit
def sinkhorn(logits, repeat, eps, N: tl.constexpr):
    """Logits [R, P, P] as matrices of positive elements, nearly doubly stochastic, with zeros outside of N x N."""
    i, j = tl.arange(0, logits.shape[1])[None, :, None], tl.arange(0, logits.shape[2])[None, None, :]
    inside = (i < N) & (j < N)
    weight = tl.where(j < N, tl.exp(logits - tl.max(tl.where(j < N, logits, -float("inf")), 2, keep_dims=True)), 0.0)
    comb = tl.where(inside, weight / tl.sum(weight, 2, keep_dims=True) + eps, 0.0)
    if repeat > 0:
        comb = share(comb, 1, eps, inside)
    for _ in range(1, repeat):
        comb = share(share(comb, 2, eps, inside), 1, eps, inside)
    return comb


@triton.jit
def weigh(tiles, weights, N: tl.constexpr):
    """[M, K] fp32: the sum of tiles of the streams, each times its weight [M, 1], one after another."""
    total = weights[0] * tiles[0].to(tl.float32)
    for i in tl.static_range(1, N):
        total += weights[i] * tiles[i].to(tl.float32)
    return total


@triton.jit
def load_streams(STREAMS, row, stream_stride, k, N: tl.constexpr, HIDDEN: tl.constexpr, ALIGNED: tl.constexpr):
    """Columns k of the N streams of tokens: [M, K] each. row: where the first streams begin, [M]."""
    tiles = ()
    for i in tl.static_range(N):
        tiles += (load_rows(STREAMS, row + i * stream_stride, k, HIDDEN, ALIGNED, True, READ_ONCE),)
    return tiles


@triton.jit
def make_weights(
    PRODUCTS, SCALE, BASE, POST, COMB, row, first, end, rms_eps, comb_eps, factor, repeat,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write post and comb of the tokens of rows [R] of PRODUCTS; the first row is that of token `first`."""
    padded: tl.constexpr = triton.next_power_of_2(N)
    live = (first + row < end)[:, None]
    token = (first + row).to(tl.int64)[:, None]
    row = tl.minimum(row, end - first - 1)
    root = inverse_root(PRODUCTS, row, rms_eps, N, HIDDEN, SPLITS, MIXES, BLOCK_S)
    # [R, P * P]
    i, j = tl.arange(0, padded * padded) // padded, tl.arange(0, padded * padded) % padded
    inside = (i < N) & (j < N)
    place = tl.where(inside, i * N + j, 0)
    logits = add_splits(PRODUCTS, row, 2 * N + 1 + place, SPLITS, MIXES, BLOCK_S) * root
    logits = logits * tl.load(SCALE + 2) + tl.load(BASE + 2 * N + place)[None, :]
    comb = sinkhorn(tl.reshape(logits, (row.shape[0], padded, padded)), repeat, comb_eps, N)
    comb = tl.reshape(comb, (row.shape[0], padded * padded))
    tl.store(COMB + token * (N * N) + place[None, :], comb, mask=live & inside[None, :])
    # [R, P]
    j = tl.arange(0, padded)
    place = tl.minimum(j, N - 1)
    gates = add_splits(PRODUCTS, row, N + 1 + place, SPLITS, MIXES, BLOCK_S) * root
    gates = factor * sigmoid(gates * tl.load(SCALE + 1) + tl.load(BASE + N + place)[None, :])
    tl.store(POST + token * N + j[None, :], gates, mask=live & (j < N)[None, :])


@triton.jit
def load_norm(NORM, k, HIDDEN: tl.constexpr, NORM_ALIGNED: tl.constexpr):
    """Columns k of the weight of the norm, whose address NORM_ALIGNED bytes divide: [1, K] fp32."""
    return tl.load(tl.multiple_of(NORM + k, NORM_ALIGNED), mask=k < HIDDEN, other=0.0).to(tl.float32)[None, :]


@triton.jit
def make_sum(
    STREAMS, PRODUCTS, SCALE, BASE, NORM, OUT, row, first, end, k, token_stride, stream_stride, rms_eps, pre_eps,
    norm_eps,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, ALIGNED: tl.constexpr, NORM_ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Write columns k of the weighed sums of the tokens of rows [M] of PRODUCTS, the first of which is `first`.

    With a norm k begins at 0, and all columns are written.
    """
    padded: tl.constexpr = triton.next_power_of_2(N)
    live = (first + row < end)[:, None]
    row = tl.minimum(row, end - first - 1)
    token = (first + row).to(tl.int64)
    # in flight while the weights are made
    tiles = load_streams(STREAMS, token * token_stride, stream_stride, k, N, HIDDEN, ALIGNED)
    root = inverse_root(PRODUCTS, row, rms_eps, N, HIDDEN, SPLITS, MIXES, BLOCK_S)
    i = tl.arange(0, padded)
    place = tl.minimum(i, N - 1)
    gates = add_splits(PRODUCTS, row, place, SPLITS, MIXES, BLOCK_S) * root
    gates = sigmoid(gates * tl.load(SCALE) + tl.load(BASE + place)[None, :]) + pre_eps
    weights = ()
    for n in tl.static_range(N):
        weight = tl.sum(tl.where((i == n)[None, :], gates, 0.0), 1)
        # of one token a scalar: of a tensor the compiler makes a copy in each thread, from all that it is made of
        weights += (tl.sum(weight, 0) if BLOCK_M == 1 else weight[:, None],)
    total = weigh(tiles, weights, N)
    out = tl.multiple_of(OUT + token * HIDDEN, OUT_ALIGNED)[:, None] + k[None, :]
    if NORM is not None:
        square = tl.sum(total * total, 1)[:, None]
        for start in range(BLOCK, HIDDEN, BLOCK):
            tiles = load_streams(STREAMS, token * token_stride, stream_stride, start + k, N, HIDDEN, ALIGNED)
            more = weigh(tiles, weights, N)
            square += tl.sum(more * more, 1)[:, None]
        scale = tl.rsqrt(square / HIDDEN + norm_eps)
        for start in range(BLOCK, HIDDEN, BLOCK):
            tiles = load_streams(STREAMS, token * token_stride, stream_stride, start + k, N, HIDDEN, ALIGNED)
            more = weigh(tiles, weights, N) * scale * load_norm(NORM, start + k, HIDDEN, NORM_ALIGNED)
            more = round_to(more, OUT.dtype.element_ty, EXACT_CASTS)
            tl.store(out + start, more, mask=live & (start + k < HIDDEN)[None, :])
        total = total * scale * load_norm(NORM, k, HIDDEN, NORM_ALIGNED)
    tl.store(out, round_to(total, OUT.dtype.element_ty, EXACT_CASTS), mask=live & (k < HIDDEN)[None, :])


@stable_kernel
def mix_kernel(
    STREAMS,  # [tokens, N, HIDDEN]
    PRODUCTS,  # [end - first, SPLITS, WIDTH] fp32
    SCALE,  # [3] fp32, of pre, post and comb; [1] of the head
    BASE,  # [MIXES] fp32
    NORM,  # [HIDDEN], or None
    POST,  # [tokens, N] fp32, dense; None for the head
    COMB,  # [tokens, N, N] fp32, dense; None for the head
    OUT,  # [tokens, HIDDEN], dense
    first: tl.int32, end: tl.int32, token_stride: tl.int64, stream_stride: tl.int64,
    rms_eps: tl.float32, pre_eps: tl.float32, comb_eps: tl.float32, factor: tl.float32, repeat: tl.int32,
    norm_eps: tl.float32,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, ALIGNED: tl.constexpr,
    NORM_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of BLOCK_R tokens + tiles of BLOCK_M tokens * blocks,): post and comb; then sums of BLOCK columns.

    For the head, only the sums. With a norm, a program makes whole sums.
    """
    blocks: tl.constexpr = 1 if NORM is not None else triton.cdiv(HIDDEN, BLOCK)
    heads = 0 if COMB is None else tl.cdiv(end - first, BLOCK_R)
    pid = tl.program_id(0)
    if pid >= heads:
        row = (pid - heads) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        k = (pid - heads) % blocks * BLOCK + tl.arange(0, BLOCK)
        make_sum(
            STREAMS, PRODUCTS, SCALE, BASE, NORM, OUT, row, first, end, k, token_stride, stream_stride, rms_eps,
            pre_eps, norm_eps, N, HIDDEN, MIXES, SPLITS, BLOCK_M, BLOCK, BLOCK_S, ALIGNED, NORM_ALIGNED, OUT_ALIGNED,
            EXACT_CASTS,
        )  # fmt: skip
    elif COMB is not None:
        rows = pid * BLOCK_R + tl.arange(0, BLOCK_R)
        make_weights(
            PRODUCTS, SCALE, BASE, POST, COMB, rows, first, end, rms_eps, comb_eps, factor, repeat,
            N, HIDDEN, MIXES, SPLITS, BLOCK_S,
        )  # fmt: skip
