"""Clauses D2 and T8 on whole layers: the bits of a token in any way it is run; entries recorded and taken.

A case input has some layers of a model, with hyper-connections around attention and around a feed-forward, and some
requests. The first tokens of a request are in the caches already: the reference computes them, since it does not matter
who wrote what a layer reads. Every way to run the other tokens begins with a fork of these requests. A fork has pages
of its own, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.attention.rank_sum import sum_in_order
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.layer.decoder_layer import DeepseekV4DecoderLayer, DeepseekV41DecoderLayer
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, LayerKey
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.model.weights import AttentionWeights, HyperConnectionWeights, weight_shapes
from dsv4attn.core.reprs import fields_repr
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong, dtype_name
from dsv4attn.testing.kit.factories import CaseInput, normal
from dsv4attn.testing.kit.strided import bits
from dsv4attn.testing.kit.tolerances import rounded

STREAMS, WEIGHTS, MIXES, NORMS, WAYS, ENTRIES = range(200, 206)
"""Streams of random numbers."""
SWA_PAGE, TOKENS_OF_PAGE = 64, 256
"""Records of a page of the window cache, and tokens whose entries share a page of a compressed cache."""
MOST_PADDING = 4
OTHER_REQUEST = -1
"""Number of the request whose tokens nobody compares."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class WholeLayers(CaseInput):
    """Layers of a model, and requests whose tokens these layers run.

    geometry: the model, on all ranks together.
    layout: layout of window caches.
    compressed_layout: layout of compressed caches; None: `layout`.
    index_layout: layout of index keys; None: what `CacheManager` takes for `layout`.
    requests: (tokens in the caches, tokens to run) of each request. Tokens in the caches are the first tokens of one
       text, the same for all requests.
    other_context: tokens in the caches of one more request, which is in some steps. Its pages hold what other requests
       left there, and nobody compares its results.
    ranks: number of tensor-parallel ranks.
    dtype: dtype of streams and matrices. In bf16 most sums that were added in another order are rounded to equal bits;
       in fp32 every one shows.
    """

    compressed_layout: KVCacheLayout | None = None
    index_layout: KVCacheLayout | None = None
    requests: Sequence[tuple[int, int]] = ((122, 10), (0, 7), (61, 4))
    other_context: int = 1500
    ranks: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def of_rank(self) -> ModelGeometry:
        """The model on one rank."""
        return self.geometry.tensor_parallel(self.ranks) if self.ranks > 1 else self.geometry

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """Decode and prefill on every kind of layer. Layers ask for no lse."""
        window, most = CacheFacts.of(self.layout, SWA_PAGE), max(self.other_context, *map(sum, self.requests))
        problems = []
        for layer in self.of_rank.distinct_layers:
            compressed, columns = None, 0
            if layer.has_entries:
                page = TOKENS_OF_PAGE // layer.compress_ratio
                compressed = CacheFacts.of(self.compressed_layout or self.layout, page)
                columns = layer.topk or -(-(most // layer.compress_ratio) // 128) * 128
            asked = partial(Problem, layer=layer, swa=window, compressed=compressed, topk=columns)
            problems += [asked(phase, q_dtype=dtype_name(self.dtype), lse=False) for phase in ("decode", "prefill")]
        return problems

    def named_layouts(self) -> list[KVCacheLayout]:
        """Layouts of all caches of keys."""
        return [self.layout, *([] if self.compressed_layout is None else [self.compressed_layout])]

    def limits(self, *, single_phase: bool) -> Limits:
        """Limits of all steps: the requests and another one, and as many sequences that these are forks of."""
        steps = sum(count for _, count in self.requests) + 2 + MOST_PADDING
        tokens = max(steps, *(prefix for prefix, _ in self.requests))
        length = max(self.other_context + 32, *map(sum, self.requests))
        return Limits(2 * (len(self.requests) + 1), tokens, length, single_phase=single_phase)

    def streams_of(self, text: int, positions: Sequence[int]) -> Tensor:
        """[T, n, d] streams with which the first layer begins, at positions of a text.

        text: 0 is the text that requests have in common, and that of the other request; i + 1 is the rest of request i.
        """
        n, d = self.geometry.hc_mult, self.geometry.hidden_size
        values = normal((self.seed, STREAMS, text), np.asarray(positions, dtype=np.int64), n * d)
        return self.tensor(rounded(values, self.dtype), self.dtype).view(-1, n, d)

    def weights_of(self, index: int, rank: int) -> AttentionWeights:
        """Weights of a layer on a rank: matrices with outputs of unit size, norms around 1."""
        tensors = {}
        for number, (name, shape) in enumerate(weight_shapes(self.geometry, index).items()):
            rows, width = shape if len(shape) == 2 else (1, *shape)
            values, dtype = normal((self.seed, WEIGHTS, index, number), np.arange(rows), width), torch.float32
            if name.endswith("norm"):
                values = 1 + 0.2 * values
            elif len(shape) == 2 and not name.endswith("ape"):
                values, dtype = values * width**-0.5, self.dtype
            tensors[name] = self.tensor(values, dtype).view(shape)
        whole = AttentionWeights.from_dict(tensors, self.geometry, index)
        return whole if self.ranks == 1 else whole.shard(rank, self.ranks)

    def connections(self, sublayer: int, backend: Backend) -> HyperConnections:
        """Hyper-connections around a sublayer, with the norm of its input."""
        n, size = self.geometry.hc_mult, self.geometry.hidden_size
        mixes = 2 * n + n * n
        fn = normal((self.seed, MIXES, sublayer), np.arange(mixes), n * size) * (n * size) ** -0.5
        base = normal((self.seed, MIXES, sublayer, 1), np.arange(1), mixes)[0]
        fp32 = partial(self.tensor, dtype=torch.float32)
        weights = HyperConnectionWeights(fp32(fn), fp32(base), torch.ones(3, dtype=torch.float32, device=self.device))
        norm = fp32(1 + 0.2 * normal((self.seed, NORMS, sublayer), np.arange(1), size)[0])
        return HyperConnections(self.geometry, weights, backend.layer_ops, norm)


Request: TypeAlias = tuple[CachedSequence, ...]
"""A sequence in the caches of each rank."""
StepMetadata: TypeAlias = Mapping[LayerKey, AttentionMetadata]


class _RankSum:
    """Attention of a layer on all ranks, whose outputs are added in the order of ranks."""

    def __init__(self, layers: Sequence[DeepseekV4Attention]) -> None:
        self.layers = layers
        self.metadata: Sequence[StepMetadata] = ()
        """Metadata of the current step on each rank."""
        self.entries: dict[str, Any] = {}
        """`record_entries` and `inject_entries` of the current step."""

    def refresh(self) -> None:
        """Weights never change."""

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Attended hidden states [T, d]."""
        parts = []
        for layer, metadata in zip(self.layers, self.metadata, strict=True):
            with set_forward_context(metadata, **self.entries):
                parts.append(layer(hidden, positions))
        return parts[0] if len(parts) == 1 else sum_in_order(torch.stack(parts)).to(hidden.dtype)


def _halved(hidden: Tensor) -> Tensor:
    """A feed-forward whose bits depend on nothing but the token."""
    return 0.5 * hidden


class Network:
    """The layers of a case input on a backend, over caches of each rank.

    backend: runs the layers.
    inputs: the layers, and what they run.
    managers: caches of each rank.
    """

    def __init__(self, backend: Backend, inputs: WholeLayers, managers: Sequence[CacheManager]) -> None:
        self.inputs, self.managers = inputs, managers
        workspace, attentions = WorkspaceManager(inputs.device), list[_RankSum]()
        for i in range(inputs.geometry.num_layers):
            attentions.append(_RankSum([self._layer(backend, i, rank, attentions, workspace) for rank in self._ranks]))
        self._attentions, self.delayed = attentions, inputs.geometry.shared_latent
        decoder_layer: Callable[..., Any] = DeepseekV41DecoderLayer if self.delayed else DeepseekV4DecoderLayer
        self._decoder_layers = [
            decoder_layer(
                cast("DeepseekV4Attention", attention),
                _halved,
                inputs.connections(2 * i, backend),
                inputs.connections(2 * i + 1, backend),
            )
            for i, attention in enumerate(attentions)
        ]

    @classmethod
    def of(cls, bench: Bench, inputs: WholeLayers) -> Network:
        """The network of a bench, with caches of its own. Limits have a single phase only if layers demand that."""
        for single_phase in (False, True):
            managers = [
                CacheManager(
                    inputs.of_rank,
                    inputs.limits(single_phase=single_phase),
                    inputs.layout,
                    compressed_layout=inputs.compressed_layout,
                    index_layout=inputs.index_layout,
                    device=inputs.device,
                    swa_block_size=SWA_PAGE,
                    compressed_block_tokens=TOKENS_OF_PAGE,
                    shuffle_seed=inputs.seed + rank,
                    keep_windows=True,
                    backend=bench.backend,
                )
                for rank in range(inputs.ranks)
            ]
            try:
                return cls(bench.backend, inputs, managers)
            except ArgumentError as error:
                if single_phase or error.argument != "limits":
                    raise
        raise AssertionError("unreachable")

    @property
    def _ranks(self) -> range:
        return range(self.inputs.ranks)

    def _layer(
        self, backend: Backend, index: int, rank: int, earlier: Sequence[_RankSum], workspace: WorkspaceManager
    ) -> DeepseekV4Attention:
        """Layer of a rank, bound to its caches."""
        manager = self.managers[rank]
        layer = DeepseekV4Attention(
            f"layers.{index}",
            manager.geometry,
            index,
            manager.limits,
            backend,
            self.inputs.weights_of(index, rank),
            workspace=workspace,
            sources=[attention.layers[rank] for attention in earlier],
        )
        layer.bind_kv_cache(manager.caches[index])
        return layer

    # requests

    def history(self) -> list[Request | None]:
        """For each request, a sequence with the tokens that are in the caches before; None for requests without any.

        The reference computes these tokens.
        """
        inputs = self.inputs
        by_reference = Network(load_backend("reference"), inputs, self.managers)
        text, sequences = self.new(), dict[int, Request]()
        for length in sorted({prefix for prefix, _ in inputs.requests if prefix}):
            done = text[0].length
            by_reference.step([(text, length - done)], inputs.streams_of(0, range(done, length)))
            sequences[length] = self.fork(text)
        self.free(text)
        return [sequences.get(prefix) for prefix, _ in inputs.requests]

    def new(self, context: int = 0) -> Request:
        """A request with a number of tokens in the caches, which hold anything."""
        request = tuple(manager.new() for manager in self.managers)
        for manager, sequence in zip(self.managers, request, strict=True):
            manager.reserve([(sequence, context)])
            manager.advance([(sequence, context)])
        return request

    def fork(self, request: Request | None) -> Request:
        """A request with the same tokens, in other pages; a new one of None."""
        if request is None:
            return self.new()
        return tuple(manager.fork(sequence) for manager, sequence in zip(self.managers, request, strict=True))

    def free(self, *requests: Request | None) -> None:
        """Give pages back."""
        for request in requests:
            for manager, sequence in zip(self.managers, request or (), strict=False):
                manager.free(sequence)

    # steps

    def step(self, requests: Sequence[tuple[Request, int]], streams: Tensor, padding: int = 0) -> Tensor:
        """Run the next tokens of requests. Returns the streams after each layer: [layers, T, n, d].

        requests: (request, number of its next tokens).
        streams: [T + padding, n, d].
        padding: rows without a token after the others.
        """
        of_rank = [[(request[rank], count) for request, count in requests] for rank in self._ranks]
        pairs = list(zip(self.managers, of_rank, strict=True))
        metadata = [manager.metadata(manager.batch(own, padding=padding)) for manager, own in pairs]
        results = self.forward(streams, self.managers[0].positions(of_rank[0], padding=padding), metadata)
        for manager, own in pairs:
            manager.advance(own)
        return results[:, : streams.shape[0] - padding]

    def states_of(self, request: Request, position: int) -> Tensor:
        """Compressor states of a token in all layers that have states, on all ranks: fp32, flat."""
        states = [torch.empty(0, dtype=torch.float32, device=self.inputs.device)]
        for manager, sequence in zip(self.managers, request, strict=True):
            for index, caches in enumerate(manager.caches):
                group = f"{manager.geometry.layer(index).kind.value}_state"
                for cache in (caches.state, caches.index_state):
                    if cache is not None:
                        column, record = divmod(position, manager.tokens_per_block[group])
                        block = sequence.tables[group].blocks[column]
                        states.append(cache.region("row")[block, record].flatten())
        return torch.cat(states)

    def step_with_entries(
        self, requests: Sequence[tuple[Request, int]], streams: Tensor, taken: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a step of one layer on one rank: streams after it [T, n, d], and the entries that it records [T, K].

        taken: [T, K] int32 entries that it takes instead of a selection.
        """
        (attention,) = self._attentions
        prefix, buffer = attention.layers[0].prefix, attention.layers[0].topk_indices
        assert buffer is not None
        recorded = torch.full_like(buffer[: len(streams)], 1 << 30)
        attention.entries = {"record_entries": {prefix: recorded}}
        if taken is not None:
            attention.entries["inject_entries"] = {prefix: taken}
        return self.step(requests, streams)[0], recorded

    def forward(self, streams: Tensor, positions: Tensor, metadata: Sequence[StepMetadata]) -> Tensor:
        """Streams after each layer [layers, T, n, d], and in V4.1 hidden states after the last layer as well."""
        pre, results = None, []
        with torch.no_grad():
            for attention, layer in zip(self._attentions, self._decoder_layers, strict=True):
                attention.metadata = metadata
                if self.delayed:
                    streams, pre = layer(streams, positions, pre)
                else:
                    streams = layer(streams, positions)
                results.append(streams)
        return torch.stack(results)


# ways


Chunk: TypeAlias = tuple[int, int]
"""Number of a request, or OTHER_REQUEST, and how many of its next tokens."""


@attrs.frozen
class Way:
    """A way to run the tokens of all requests.

    name: the way in words, for messages.
    steps: of each step, the requests and the number of their next tokens.
    padding: for each step, the number of rows that belong to no token. By default 0 for all.
    """

    name: str
    steps: Sequence[Sequence[Chunk]]
    padding: Sequence[int] = attrs.Factory(lambda self: [0] * len(self.steps), takes_self=True)


def drawn_ways(counts: Sequence[int], seed: int) -> list[Way]:
    """Ways to run requests with these numbers of tokens; the last two are drawn at random."""
    requests = range(len(counts))
    ways = [
        Way("each request alone", [[(request, counts[request])] for request in requests]),
        Way(
            "token by token, all requests together",
            [[(request, 1) for request in requests if counts[request] > i] for i in range(max(counts))],
        ),
    ]
    rng = np.random.default_rng((seed, WAYS))
    for i in range(2):
        left, steps, padding = [*counts], list[list[Chunk]](), list[int]()
        while any(left):
            open_requests = [request for request in requests if left[request]]
            chosen = rng.permutation(open_requests)[: rng.integers(1, len(open_requests) + 1)].tolist()
            step = [(request, int(rng.integers(1, min(left[request], 6) + 1))) for request in chosen]
            for request, count in step:
                left[request] -= count
            if rng.random() < 0.5:
                step.insert(int(rng.integers(len(step) + 1)), (OTHER_REQUEST, int(rng.integers(1, 3))))
            steps.append(step)
            padding.append(int(rng.integers(MOST_PADDING + 1)))
        ways.append(Way(f"random way {i + 1}", steps, padding))
    return ways


class TokenBits(NamedTuple):
    """What a token left.

    streams: [layers, n, d] bits of the streams after each layer.
    states: bits of its compressor states in all layers.
    """

    streams: Tensor
    states: Tensor

    def __repr__(self) -> str:
        return fields_repr(self)


RowBits: TypeAlias = dict[tuple[int, int], TokenBits]
"""What tokens left, by request and position."""


def _left(network: Network, request: Request, position: int, streams: Tensor) -> TokenBits:
    """What a token left. Raises Wrong if that is not finite, since NaN would equal NaN."""
    states = network.states_of(request, position)
    if not (streams.isfinite().all() and states.isfinite().all()):
        raise Wrong(f"a token at position {position} is not finite")
    return TokenBits(bits(streams), bits(states))


def _rows_of(network: Network, history: Sequence[Request | None], way: Way) -> RowBits:
    """Run the tokens of all requests in a way."""
    inputs, rows = network.inputs, RowBits()
    requests = {i: network.fork(request) for i, request in enumerate(history)}
    if any(request == OTHER_REQUEST for step in way.steps for request, _ in step):
        requests[OTHER_REQUEST] = network.new(inputs.other_context)
    for step, padding in zip(way.steps, way.padding, strict=True):
        tokens = [(number, requests[number][0].length + i) for number, count in step for i in range(count)]
        streams = [inputs.streams_of(number + 1, [position]) for number, position in tokens]
        rows_of_padding = inputs.streams_of(0, range(padding)).fill_(torch.nan)
        results = network.step(
            [(requests[number], count) for number, count in step], torch.cat([*streams, rows_of_padding]), padding
        )
        for row, (number, position) in enumerate(tokens):
            if number != OTHER_REQUEST:
                rows[number, position] = _left(network, requests[number], position, results[:, row])
    network.free(*requests.values())
    return rows


def _require_same(name: str, rows: RowBits, expected: RowBits) -> None:
    """Raise Wrong unless tokens have the expected bits."""
    wrong = [token for token, bits_of in expected.items() if not all(map(torch.equal, rows[token], bits_of))]
    if wrong:
        request, position = wrong[0]
        layers = (rows[wrong[0]].streams != expected[wrong[0]].streams).flatten(1).any(1).nonzero()[:, 0].tolist()
        what = f"after layer {layers[0]}" if layers else "in the states of a compressor"
        where = f"first request {request}, position {position}, {what}"
        raise Wrong(f"{name}: {len(wrong)} of {len(expected)} tokens have other bits, {where}")


def _started(bench: Bench, inputs: WholeLayers) -> tuple[Network, list[Request | None]]:
    """A network, and its requests before the first step. Raises SkipCase unless the backend is deterministic."""
    if not bench.backend.deterministic:
        raise SkipCase("does not apply: the backend was not built with deterministic=true")
    network = Network.of(bench, inputs)
    return network, network.history()


def same_bits_in_any_way(bench: Bench, inputs: WholeLayers) -> Measure:
    """All tokens have the bits that they have in one step, in whatever way they are run."""
    network, history = _started(bench, inputs)
    counts = [count for _, count in inputs.requests]
    expected = _rows_of(network, history, Way("all tokens in one step", [[*enumerate(counts)]]))
    for way in drawn_ways(counts, inputs.seed):
        _require_same(way.name, _rows_of(network, history, way), expected)
    return Measure()


# entries


def records_and_takes_entries(bench: Bench, inputs: WholeLayers) -> Measure:
    """A c4a layer records what it selects. With entries of others it attends to these, and stores what it always does.

    The reference, with the same entries, says what the layer then gives. A step later the layer selects what it selects
    after a step of its own entries, so the index keys of that step are there.
    """
    network = Network.of(bench, inputs)
    history, by_reference = network.history(), Network(load_backend("reference"), inputs, network.managers)
    counts = [count - 1 for _, count in inputs.requests]
    places = [(i, prefix + p) for i, (prefix, _) in enumerate(inputs.requests) for p in range(counts[i])]
    streams = torch.cat([inputs.streams_of(i + 1, [position]) for i, position in places])
    last = torch.cat([inputs.streams_of(i + 1, [sum(request) - 1]) for i, request in enumerate(inputs.requests)])
    ratio = inputs.geometry.layers[0][1]
    complete = [(position + 1) // ratio for _, position in places]
    visible = torch.tensor(complete, dtype=torch.int32, device=inputs.device)[:, None]
    rng, others = np.random.default_rng((inputs.seed, ENTRIES)), list[Tensor]()

    def run(on: Network, taken: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Streams and entries of a step, and entries of one more token of each request, which selects."""
        requests = [on.fork(request) for request in history]
        out, recorded = on.step_with_entries([*zip(requests, counts, strict=True)], streams, taken)
        _, later = on.step_with_entries([(request, 1) for request in requests], last)
        on.free(*requests)
        return out, recorded, later

    own, recorded, later = run(network)
    columns = torch.arange(recorded.shape[1], dtype=torch.int32, device=inputs.device)
    filled = columns < visible.clamp(max=recorded.shape[1])
    ascending = (recorded[:, 1:] > recorded[:, :-1]) | ~filled[:, 1:]
    if not (torch.equal(recorded < 0, ~filled) and ascending.all() and (recorded < visible).all()):
        raise Wrong("a layer does not record ascending entries that its tokens see, then -1")
    for count in complete:
        chosen = sorted(rng.permutation(count)[: rng.integers(recorded.shape[1] + 1)].tolist())
        row = [*chosen, *[-1] * (recorded.shape[1] - len(chosen))]
        others.append(torch.tensor(row, dtype=torch.int32, device="cpu"))
    taken = torch.stack(others).to(inputs.device)
    out, again, later_then = run(network, taken)
    if not torch.equal(again, taken):
        raise Wrong("a layer that takes entries does not record them")
    if not torch.equal(later, later_then):
        raise Wrong("after a step that takes entries, a layer selects others: its index keys are not there")
    expected, _, _ = run(by_reference, taken)
    # how much other entries change the result, which is what a layer that selects all the same gets wrong
    effect = float((expected - own).float().square().mean().sqrt())
    error = float((out - expected).float().square().mean().sqrt())
    return Measure(error, effect / 4).hold("a layer that takes entries, from the reference with these entries")


# graphs


def _captured(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A function that replays what `run` launches, and the tensor that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def same_bits_in_graphs(bench: Bench, inputs: WholeLayers) -> Measure:
    """Decodes in a captured graph, in a batch with a request of padding, have the bits of steps that are not captured.

    The first min(counts) tokens of all requests are run. The graph was captured before the first of them, on requests
    of one token that are padding.
    """
    if torch.device(inputs.device).type != "cuda":
        raise SkipCase("does not apply: graphs are captured on GPUs of NVIDIA and AMD")
    return replayed(bench, inputs, _captured)


def replayed(
    bench: Bench, inputs: WholeLayers, capture: Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
) -> Measure:
    """The check `same_bits_in_graphs`.

    capture: takes a function that runs a step in buffers. Returns a function that runs it again, and the result.
    """
    network, history = _started(bench, inputs)
    (manager,) = network.managers
    count = min(count for _, count in inputs.requests)
    requests = range(len(inputs.requests))
    expected = _rows_of(network, history, Way("one step", [[(request, count) for request in requests]]))
    batch = _padding_batch(manager, len(requests) + 1)
    positions = torch.zeros(batch.num_reqs, dtype=torch.int64, device=inputs.device)
    streams = inputs.streams_of(0, range(batch.num_reqs))

    metadata = manager.metadata(batch, full_width=True)

    def run() -> Tensor:
        return network.forward(streams, positions, [metadata])

    run()  # compiles, converts weights, reserves memory
    replay, out = capture(run)
    forks, rows = [network.fork(request) for request in history], RowBits()
    for _ in range(count):
        step = [(sequence, 1) for (sequence,) in forks]
        described, places = manager.batch(step), [sequence.length for sequence, _ in step]
        _fill(batch, described)
        positions[: len(step)].copy_(manager.positions(step))
        for request, position in enumerate(places):
            streams[request].copy_(inputs.streams_of(request + 1, [position])[0])
        manager.metadata(batch, full_width=True)
        replay()
        for request, position in enumerate(places):
            rows[request, position] = _left(network, forks[request], position, out[:, request])
        manager.advance(step)
    network.free(*forks, *history)
    _require_same("replays of a graph", rows, expected)
    return Measure()


def _padding_batch(manager: CacheManager, requests: int) -> Batch:
    """A batch of requests of one token that are padding, in buffers wide enough for any request."""
    device, longest = manager.device, manager.limits.max_model_len
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cpu")
    ones = torch.ones(requests, dtype=torch.int32, device="cpu")
    tables: dict[str, Any] = {
        _TABLES[name]: torch.full((requests, -(-longest // tokens)), -1, dtype=torch.int32, device=device)
        for name, tokens in manager.tokens_per_block.items()
    }
    return Batch(
        num_reqs=requests,
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=ones.to(device),
        seq_lens_cpu=ones.clone(),
        slot_mapping=torch.full((requests,), -1, dtype=torch.int64, device=device),
        **tables,
    )


_TABLES = {
    "window": "block_table",
    "compressed": "compressed_block_table",
    "c4a_state": "c4a_state_block_table",
    "c128a_state": "c128a_state_block_table",
}
"""Field of `Batch` for each group of a `CacheManager`."""


def _fill(batch: Batch, described: Batch) -> None:
    """Write a step of fewer requests into the buffers of a batch. The requests after them stay padding."""
    requests = described.num_reqs
    for name in ("seq_lens", "seq_lens_cpu", "slot_mapping"):
        getattr(batch, name)[:requests].copy_(getattr(described, name))
    for name in _TABLES.values():
        table = getattr(described, name)
        if table is not None:
            getattr(batch, name)[:requests, : table.shape[1]].copy_(table)
