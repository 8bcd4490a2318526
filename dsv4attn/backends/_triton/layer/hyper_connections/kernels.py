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

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import round_to
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2

READ_ONCE = tl.constexpr("evict_first")
"""Policy for what is not read again soon, so that the cache keeps the new streams until they are mixed."""
MOST_EARLY = tl.constexpr(4)
"""Most streams whose factors are loaded before anything is computed; of more there would be too many."""


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
    FN, fn_stride, k, stream, HIDDEN: tl.constexpr, MIXES: tl.constexpr, BLOCK_C: tl.constexpr,
    FN_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Factors [K, C] of columns k of a stream."""
    mix = tl.arange(0, BLOCK_C)
    live = (mix < MIXES)[None, :] & (k < HIDDEN)[:, None]
    at = tl.multiple_of(FN + stream * HIDDEN + mix.to(tl.int64) * fn_stride, FN_ALIGNED)[None, :] + k[:, None]
    return tl.load(at, mask=live, other=0.0)


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
    """Columns k of rows [M], which begin `row` elements after START and at multiples of ALIGNED bytes: [M, K].

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
    width: tl.constexpr = cdiv(MIXES + 1, 8) * 8
    row = PRODUCTS + (m.to(tl.int64) * splits + split) * width
    mix = tl.arange(0, acc.shape[1])
    column = tl.where(mix < N, mix, mix + 1)
    # whole rows, with zeros after the products: memory is slow to take parts of its words
    tl.store(row[:, None] + column[None, :], acc, mask=(m < count)[:, None] & (mix < width - 1)[None, :])
    tl.store(row + N, tl.sum(squares, 1), mask=m < count)


@stable_kernel
def products_kernel(
    STREAMS,  # [tokens, N, HIDDEN]
    FN,  # [MIXES, N * HIDDEN] fp32
    PRODUCTS,  # [end - first, splits, WIDTH] fp32
    X,  # [tokens, HIDDEN], or None: products are of the streams as they are
    POST,  # [tokens, N] fp32, or None without X
    COMB,  # [tokens, N, N] fp32, or None without X
    OUT,  # [tokens, N, HIDDEN], dense, or None without X
    first: tl.int32, end: tl.int32, groups: tl.int32, fn_stride: tl.int64, token_stride: tl.int64,
    stream_stride: tl.int64, x_stride: tl.int64, post_stride: tl.int64, weight_stride: tl.int64, comb_stride: tl.int64,
    mix_stride: tl.int64,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr,
    ALIGNED: tl.constexpr, FN_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, IN_BF16: tl.constexpr,
    EXACT_CASTS: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """Grid: (groups * splits,): products of tokens first .. end with fn, and sums of squares, of BLOCK_K columns.

    Of each stream, that is. With X these are the new streams, which are stored in OUT. The programs of a split share
    its token tiles. HELD: whether the factors stay in shared memory; otherwise they are loaded for each tile. ALIGNED,
    FN_ALIGNED, OUT_ALIGNED: bytes that divide the address of every row of x and the streams, of a stream's columns in
    every row of fn, and of every row of OUT. NEXT: whether the next kernel may begin before this one has ended; if it
    is launched so, it waits.
    """
    launch_dependents(NEXT)
    splits: tl.constexpr = cdiv(HIDDEN, BLOCK_K)
    masked: tl.constexpr = HIDDEN % BLOCK_K != 0
    split = tl.program_id(0) % splits
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k < HIDDEN)[None, :]
    early: tl.constexpr = HELD or N <= MOST_EARLY
    factors = ()
    for j in tl.static_range(N if early else 0):
        loaded = load_factors(FN, fn_stride, k, j, HIDDEN, MIXES, BLOCK_C, FN_ALIGNED)
        factors += (split_factors(loaded, IN_BF16) if HELD else loaded,)
    for start in tl.range(tl.program_id(0) // splits * BLOCK_M, end - first, groups * BLOCK_M, num_stages=STAGES):
        m = start + tl.arange(0, BLOCK_M)
        # tokens past the end are the last one again, which costs less than a mask
        token = tl.minimum(first + m, end - 1).to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        if X is not None:
            live = (first + m < end)[:, None]
            news = new_streams(
                X, STREAMS, POST, COMB, token, k, x_stride, token_stride, stream_stride, post_stride, weight_stride,
                comb_stride, mix_stride, N, HIDDEN, ALIGNED, masked,
            )  # fmt: skip
        for j in tl.static_range(N):
            if X is None:
                row = token * token_stride + j * stream_stride
                tile = load_rows(STREAMS, row, k, HIDDEN, ALIGNED, masked, "")
            else:
                tile = round_to(made_once(news[j], EXACT_CASTS), OUT.dtype.element_ty, EXACT_CASTS)
                at = tl.multiple_of(OUT + (token * N + j) * HIDDEN, OUT_ALIGNED)[:, None] + k[None, :]
                tl.store(at, tile, mask=live & inside if masked else live)
            if HELD:
                acc = add_product(acc, tile, factors[j], IN_BF16)
            elif early:
                acc = add_product(acc, tile, split_factors(factors[j], IN_BF16), IN_BF16)
            else:
                loaded = load_factors(FN, fn_stride, k, j, HIDDEN, MIXES, BLOCK_C, FN_ALIGNED)
                acc = add_product(acc, tile, split_factors(loaded, IN_BF16), IN_BF16)
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
    blocks: tl.constexpr = cdiv(HIDDEN, BLOCK)
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
def add_splits(PRODUCTS, row, SPLITS: tl.constexpr, MIXES: tl.constexpr, COUNT: tl.constexpr, BLOCK_S: tl.constexpr):
    """[R, C] fp32: sums over the splits of the first COUNT columns of rows [R], with one load of them."""
    width: tl.constexpr = cdiv(MIXES + 1, 8) * 8
    column = tl.arange(0, next_power_of_2(COUNT))
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, SPLITS, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        part = PRODUCTS + (row.to(tl.int64)[:, None] * SPLITS + split[None, :]) * width
        live = (split < SPLITS)[None, :, None] & (column < COUNT)[None, None, :]
        total += tl.sum(tl.load(part[:, :, None] + column[None, None, :], mask=live, other=0.0), 1)
    return total


@triton.jit
def column_of(x, PLACE: tl.constexpr):
    """[R]: column PLACE of x [R, C]."""
    return tl.sum(tl.where((tl.arange(0, x.shape[1]) == PLACE)[None, :], x, 0.0), 1)


@triton.jit
def inverse_root(sums, eps, N: tl.constexpr, HIDDEN: tl.constexpr):
    """[R] fp32: 1 / the root of the mean square of the streams of rows [R], by their sums [R, C]."""
    return tl.rsqrt(column_of(sums, N) / (N * HIDDEN) + eps)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def share(comb, eps, N: tl.constexpr, ROWS: tl.constexpr):
    """Elements of N x N matrices, each over the sum of its row, or column, plus eps."""
    parts = ()
    for a in tl.static_range(N):
        total = comb[a * N if ROWS else a]
        for b in tl.static_range(1, N):
            total += comb[a * N + b if ROWS else b * N + a]
        parts += (1.0 / (total + eps),)
    shares = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            shares += (comb[i * N + j] * parts[i if ROWS else j],)
    return shares


@triton.jit
def sinkhorn(logits, repeat, eps, N: tl.constexpr):
    """Logits as matrices of positive elements, nearly doubly stochastic.

    Of the N * N elements of a matrix each is a tensor [R], so that a thread has whole matrices.
    """
    weights = ()
    for i in tl.static_range(N):
        most = logits[i * N]
        for j in tl.static_range(1, N):
            most = tl.maximum(most, logits[i * N + j])
        for j in tl.static_range(N):
            weights += (tl.exp(logits[i * N + j] - most),)
    comb = ()
    shares = share(weights, 0.0, N, True)
    for i in tl.static_range(N * N):
        comb += (shares[i] + eps,)
    if repeat > 0:
        comb = share(comb, eps, N, False)
    for _ in range(1, repeat):
        comb = share(share(comb, eps, N, True), eps, N, False)
    return comb


@triton.jit
def fast_reciprocal(x, ASM: tl.constexpr):
    """1 / x of positive x that is not subnormal, with an error of one unit in the last place. ASM: on NVIDIA."""
    if ASM:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def scale_sums(weights, own, others, eps, N: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """Factors `own` of the rows, or columns, of N x N matrices, each over the sum of its row, or column, plus eps.

    An element of a matrix is a weight times the factors of its row and column. others: factors of columns, or rows.
    """
    factors = ()
    for a in tl.static_range(N):
        total = weights[a * N if ROWS else a] * others[0]
        for b in tl.static_range(1, N):
            total += weights[a * N + b if ROWS else b * N + a] * others[b]
        factors += (own[a] * fast_reciprocal(own[a] * total + eps, ASM),)
    return factors


@triton.jit
def sinkhorn_by_factors(logits, repeat, eps, N: tl.constexpr, ASM: tl.constexpr):
    """What `sinkhorn` makes. Iterations change factors of rows and columns, not matrices: fewer operations."""
    weights, rows, columns = (), (), ()
    for i in tl.static_range(N):
        most = logits[i * N]
        for j in tl.static_range(1, N):
            most = tl.maximum(most, logits[i * N + j])
        exps = (tl.exp(logits[i * N] - most),)
        total = exps[0]
        for j in tl.static_range(1, N):
            exps += (tl.exp(logits[i * N + j] - most),)
            total += exps[j]
        part = fast_reciprocal(total, ASM)
        for j in tl.static_range(N):
            weights += (exps[j] * part + eps,)
        rows += (tl.full(most.shape, 1.0, tl.float32),)
        columns += (tl.full(most.shape, 1.0, tl.float32),)
    if repeat > 0:
        columns = scale_sums(weights, columns, rows, eps, N, False, ASM)
    for _ in range(1, repeat):
        rows = scale_sums(weights, rows, columns, eps, N, True, ASM)
        columns = scale_sums(weights, columns, rows, eps, N, False, ASM)
    comb = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            comb += (weights[i * N + j] * rows[i] * columns[j],)
    return comb


@triton.jit
def spread_column(x, PLACE: tl.constexpr):
    """[R, C]: column PLACE of x [R, C] in each column."""
    return tl.gather(x, tl.full(x.shape, PLACE, tl.int32), 1)


@triton.jit
def make_weights_by_factors(
    PRODUCTS, SCALE, BASE, PRE, POST, COMB, row, first, end, rms_eps, pre_eps, comb_eps, factor, repeat,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """What `make_weights` writes, with a column of a row's products in each thread, and its whole matrix too."""
    width: tl.constexpr = cdiv(MIXES + 1, 8) * 8
    column = tl.arange(0, next_power_of_2(width))
    # column N has the squares
    mix = tl.where(column > N, column - 1, column)
    kind = tl.where(mix < N, 0, tl.where(mix < 2 * N, 1, 2))
    scale = tl.load(SCALE + kind)[None, :]
    base = tl.load(BASE + mix, mask=(mix < MIXES) & (column != N), other=0.0)[None, :]
    live = (first + row < end)[:, None]
    token = (first + row).to(tl.int64)[:, None]
    row = tl.minimum(row, end - first - 1)
    sums = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, SPLITS, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        part = PRODUCTS + (row.to(tl.int64)[:, None] * SPLITS + split[None, :]) * width
        inside = (split < SPLITS)[None, :, None] & (column < width)[None, None, :]
        sums += tl.sum(tl.load(part[:, :, None] + column[None, None, :], mask=inside, other=0.0), 1)
    gates = sums * tl.rsqrt(spread_column(sums, N) / (N * HIDDEN) + rms_eps) * scale + base
    logits = ()
    for e in tl.static_range(N * N):
        logits += (spread_column(gates, 2 * N + 1 + e),)
    comb = sinkhorn_by_factors(logits, repeat, comb_eps, N, ASM)
    out = comb[0]
    for e in tl.static_range(1, N * N):
        out = tl.where(column[None, :] == e, comb[e], out)
    tl.store(COMB + (token * (N * N) + column[None, :]), out, mask=live & (column < N * N)[None, :])
    place = token * N + (mix % N)[None, :]
    shares = sigmoid(gates)
    tl.store(POST + place, factor * shares, mask=live & ((column > N) & (mix < 2 * N))[None, :])
    if PRE is not None:
        tl.store(PRE + place, shares + pre_eps, mask=live & (column < N)[None, :])


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
    PRODUCTS, SCALE, BASE, PRE, POST, COMB, row, first, end, rms_eps, pre_eps, comb_eps, factor, repeat,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write post and comb, and pre if it goes out, of the tokens of rows [R] of PRODUCTS, the first that of `first`."""
    live = first + row < end
    token = (first + row).to(tl.int64)
    row = tl.minimum(row, end - first - 1)
    sums = add_splits(PRODUCTS, row, SPLITS, MIXES, MIXES + 1, BLOCK_S)
    root = inverse_root(sums, rms_eps, N, HIDDEN)
    logits = ()
    for e in tl.static_range(N * N):
        product = column_of(sums, 2 * N + 1 + e) * root
        logits += (product * tl.load(SCALE + 2) + tl.load(BASE + 2 * N + e),)
    comb = sinkhorn(logits, repeat, comb_eps, N)
    for e in tl.static_range(N * N):
        tl.store(COMB + token * (N * N) + e, comb[e], mask=live)
    for j in tl.static_range(N):
        gate = column_of(sums, N + 1 + j) * root * tl.load(SCALE + 1) + tl.load(BASE + N + j)
        tl.store(POST + token * N + j, factor * sigmoid(gate), mask=live)
        if PRE is not None:
            gate = column_of(sums, j) * root * tl.load(SCALE) + tl.load(BASE + j)
            tl.store(PRE + token * N + j, sigmoid(gate) + pre_eps, mask=live)


@triton.jit
def load_norm(NORM, k, HIDDEN: tl.constexpr, NORM_ALIGNED: tl.constexpr):
    """Columns k of the weight of the norm, whose address NORM_ALIGNED bytes divide: [K], in its own dtype."""
    return tl.load(tl.multiple_of(NORM + k, NORM_ALIGNED), mask=k < HIDDEN, other=0.0)


@triton.jit
def make_sum(
    STREAMS, PRODUCTS, SCALE, BASE, NORM, PREVIOUS, PRE, OUT, row, first, end, k, token_stride, stream_stride,
    previous_stride, weight_stride, rms_eps, pre_eps, norm_eps,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_A: tl.constexpr, ALIGNED: tl.constexpr, NORM_ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write columns k of the weighed sums of the tokens of rows [M] of PRODUCTS, the first of which is `first`.

    With a norm k begins at 0, and all columns are written. Weights are those of PRODUCTS, or PREVIOUS; of the first
    delayed sublayer, which writes PRE and has no PREVIOUS, the sum is stream 0.
    """
    used: tl.constexpr = N if PRE is None or PREVIOUS is not None else 1
    gated: tl.constexpr = PREVIOUS is None and PRE is None
    # while a program goes through more blocks, it has no registers for what only the first needs
    norm_early: tl.constexpr = EARLY and HIDDEN <= BLOCK
    bases = ()
    if EARLY and gated:
        scale = tl.load(SCALE)
        for n in tl.static_range(N):
            bases += (tl.load(BASE + n),)
    if norm_early and NORM is not None:
        norm = load_norm(NORM, k, HIDDEN, NORM_ALIGNED)
    live = (first + row < end)[:, None]
    row = tl.minimum(row, end - first - 1)
    token = (first + row).to(tl.int64)
    # in flight while the weights are made
    tiles = load_streams(STREAMS, token * token_stride, stream_stride, k, used, HIDDEN, ALIGNED)
    weights = ()
    if PREVIOUS is not None:
        for n in tl.static_range(N):
            weight = tl.load(PREVIOUS + token * previous_stride + n * weight_stride)
            weights += (tl.sum(weight, 0) if BLOCK_M == 1 else weight[:, None],)
    elif PRE is None:
        sums = add_splits(PRODUCTS, row, SPLITS, MIXES, N + 1, BLOCK_A)
        root = inverse_root(sums, rms_eps, N, HIDDEN)
        for n in tl.static_range(N):
            gate = column_of(sums, n) * root * (scale if EARLY else tl.load(SCALE))
            gate += bases[n] if EARLY else tl.load(BASE + n)
            weight = sigmoid(gate) + pre_eps
            # of one token a scalar: of a tensor the compiler makes a copy in each thread, from all that it is made of
            weights += (tl.sum(weight, 0) if BLOCK_M == 1 else weight[:, None],)
    else:
        weights += (1.0,)
    total = weigh(tiles, weights, used)
    out = tl.multiple_of(OUT + token * HIDDEN, OUT_ALIGNED)[:, None] + k[None, :]
    if NORM is not None:
        square = tl.sum(total * total, 1)[:, None]
        for start in range(BLOCK, HIDDEN, BLOCK):
            tiles = load_streams(STREAMS, token * token_stride, stream_stride, start + k, used, HIDDEN, ALIGNED)
            more = weigh(tiles, weights, used)
            square += tl.sum(more * more, 1)[:, None]
        root = tl.rsqrt(square / HIDDEN + norm_eps)
        for start in range(BLOCK, HIDDEN, BLOCK):
            tiles = load_streams(STREAMS, token * token_stride, stream_stride, start + k, used, HIDDEN, ALIGNED)
            more = weigh(tiles, weights, used) * root
            more *= load_norm(NORM, start + k, HIDDEN, NORM_ALIGNED).to(tl.float32)[None, :]
            more = round_to(more, OUT.dtype.element_ty, EXACT_CASTS)
            tl.store(out + start, more, mask=live & (start + k < HIDDEN)[None, :])
        total *= root
        if not norm_early:
            norm = load_norm(NORM, k, HIDDEN, NORM_ALIGNED)
        total *= norm.to(tl.float32)[None, :]
    tl.store(out, round_to(total, OUT.dtype.element_ty, EXACT_CASTS), mask=live & (k < HIDDEN)[None, :])


@stable_kernel
def mix_kernel(
    STREAMS,  # [tokens, N, HIDDEN]
    PRODUCTS,  # [end - first, SPLITS, WIDTH] fp32; None where only PREVIOUS weighs, as SCALE and BASE
    SCALE,  # [3] fp32, of pre, post and comb; [1] of the head
    BASE,  # [MIXES] fp32
    NORM,  # [HIDDEN], or None
    PREVIOUS,  # [tokens, N] fp32: pre of the sublayer before, which weighs the streams; or None
    PRE,  # [tokens, N] fp32, dense, for the next sublayer; None where pre weighs the streams itself
    POST,  # [tokens, N] fp32, dense; None for the head
    COMB,  # [tokens, N, N] fp32, dense; None for the head
    OUT,  # [tokens, HIDDEN], dense
    first: tl.int32, end: tl.int32, token_stride: tl.int64, stream_stride: tl.int64, previous_stride: tl.int64,
    weight_stride: tl.int64, rms_eps: tl.float32, pre_eps: tl.float32, comb_eps: tl.float32, factor: tl.float32,
    repeat: tl.int32, norm_eps: tl.float32,
    N: tl.constexpr, HIDDEN: tl.constexpr, MIXES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    ALIGNED: tl.constexpr, NORM_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
    BY_FACTORS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of BLOCK_R tokens + tiles of BLOCK_M tokens * blocks,): post and comb; then sums of BLOCK columns.

    For the head, and where streams are collapsed, only the sums. With a norm, a program makes whole sums.
    BY_FACTORS: whether Sinkhorn's iterations are those of `sinkhorn_by_factors`, on NVIDIA. EARLY: whether the programs
    of the sums load scale, base and norm before anything else.
    """
    wait_then_launch_dependents(PDL)
    blocks: tl.constexpr = 1 if NORM is not None else cdiv(HIDDEN, BLOCK)
    heads = 0 if COMB is None else tl.cdiv(end - first, BLOCK_R)
    pid = tl.program_id(0)
    if pid >= heads:
        row = (pid - heads) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        k = (pid - heads) % blocks * BLOCK + tl.arange(0, BLOCK)
        make_sum(
            STREAMS, PRODUCTS, SCALE, BASE, NORM, PREVIOUS, PRE, OUT, row, first, end, k, token_stride, stream_stride,
            previous_stride, weight_stride, rms_eps, pre_eps, norm_eps,
            N, HIDDEN, MIXES, SPLITS, BLOCK_M, BLOCK, BLOCK_A, ALIGNED, NORM_ALIGNED, OUT_ALIGNED, EXACT_CASTS,
            EARLY,
        )  # fmt: skip
    elif COMB is not None:
        rows = pid * BLOCK_R + tl.arange(0, BLOCK_R)
        if BY_FACTORS:
            make_weights_by_factors(
                PRODUCTS, SCALE, BASE, PRE, POST, COMB, rows, first, end, rms_eps, pre_eps, comb_eps, factor, repeat,
                N, HIDDEN, MIXES, SPLITS, BLOCK_S, EXACT_CASTS,
            )  # fmt: skip
        else:
            make_weights(
                PRODUCTS, SCALE, BASE, PRE, POST, COMB, rows, first, end, rms_eps, pre_eps, comb_eps, factor, repeat,
                N, HIDDEN, MIXES, SPLITS, BLOCK_S,
            )  # fmt: skip
