"""Results of a replay as plain data: errors, times and memory of each layer type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict, astuple, define, evolve, field, frozen

if TYPE_CHECKING:
    from dsv4attn.tools.replay.over_ranks import RanksReport

SHOWN_FAILURES = 5
"""Failed rows of a layer type that are described; all are counted."""


LAYER_OPERATIONS = "projections", "insert", "compressor", "indexer", "attend", "project"
"""Operations of a layer that are timed, in the order in which they run.

projections: of hidden states to q and to keys, with their norms. insert: q-norm, RoPE and insertion of window keys.
compressor: projections, states and entries, of index keys too. indexer: projections, scores and selection. attend:
`forward_mqa`: index arithmetic, gathering, attention. project: inverse RoPE and both output projections.
"""


@frozen
class Errors:
    """Errors of checked rows, or their limits. None: not compared, or in a limit: not compared on this kind of run.

    `check_layer` defines them.

    out: relative error of the output.
    lse: absolute error of the lse.
    projection: relative error of the output of the layer.
    key: largest error of an element of a window key, as a share of what rounding explains.
    query: the same of q, normalised and rotated.
    entry: the same of a compressed entry.
    index_key: the same of an index key.
    index_query: the same of a query of the indexer.
    selection: by how much an entry that was not selected beats one that was, as a share of what fp32 sums explain;
    None if no scores were computed.
    """

    out: float = 0.0
    lse: float = 0.0
    projection: float = 0.0
    key: float | None = None
    query: float | None = None
    entry: float | None = None
    index_key: float | None = None
    index_query: float | None = None
    selection: float | None = None

    def worst(self, other: Errors) -> Errors:
        """The larger of each."""
        pairs = zip(asdict(self), self, other, strict=True)
        larger: dict[str, Any] = {name: b for name, a, b in pairs if a is None or (b is not None and b > a)}
        return evolve(self, **larger)

    def beyond(self, limit: Errors) -> list[str]:
        """Names of the errors that exceed their limit."""
        pairs = zip(asdict(self), self, limit, strict=True)
        return [name for name, a, b in pairs if a is not None and not (b is not None and a <= b)]

    def __iter__(self) -> Iterator[float | None]:
        """Iterate in the order of the fields."""
        return iter(astuple(self))


@define
class CheckResult:
    """Checked rows of one layer type.

    tolerance: largest errors allowed.
    rows: rows that were checked.
    failed: rows beyond a tolerance.
    selecting: rows that saw more entries than the indexer selects, and whose selection was compared.
    worst: largest errors.
    failures: one line for each failed row, at most SHOWN_FAILURES.
    """

    tolerance: Errors
    rows: int = 0
    failed: int = 0
    selecting: int = 0
    worst: Errors = field(factory=Errors)
    failures: list[str] = field(factory=list)

    def add(self, errors: Errors, where: str, *, selecting: bool = False) -> None:
        """Account for one row. selecting: whether its indexer left entries out."""
        self.rows += 1
        self.selecting += selecting
        self.worst = self.worst.worst(errors)
        beyond = errors.beyond(self.tolerance)
        if beyond:
            self.failed += 1
            if len(self.failures) < SHOWN_FAILURES:
                said = ", ".join(f"{name} {getattr(errors, name):.2g}" for name in beyond)
                self.failures.append(f"{where}: {said}")

    @property
    def ok(self) -> bool:
        """Whether no row failed; also true when none was checked."""
        return not self.failed


@define
class LayerReport:
    """One layer that represents all layers of its type.

    kind: layer type.
    layers_in_model: layers of this type in the model.
    kv_bytes_per_token: bytes of a page of compressed entries, and of index keys, per token; the part that grows with
    the context.
    window_bytes_per_sequence: bytes of the window pages that one idle sequence can hold; the part that does not grow.
    kv_bytes_peak: most bytes of pages of all caches in use at once.
    workspace_bytes_peak: most bytes of the workspace in one call.
    workspace_bytes_planned: bytes of the workspace plan.
    transient_bytes_bound: bytes that a call may take from the framework's allocator besides the workspace; 0 for
    backends with kernels.
    tokens: tokens served.
    seconds: time by operation.
    check: checked rows, or None.
    state_bytes_per_sequence: bytes of the pages of compressor states that one idle sequence can hold.
    topk: entries that the indexer selects for a token; None without an indexer.
    selecting_tokens: fewest tokens whose last one sees more entries than that; None without an indexer.
    """

    kind: str
    layers_in_model: int
    kv_bytes_per_token: float
    window_bytes_per_sequence: int
    kv_bytes_peak: int = 0
    workspace_bytes_peak: int = 0
    workspace_bytes_planned: int = 0
    transient_bytes_bound: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(factory=lambda: dict.fromkeys(LAYER_OPERATIONS, 0.0))
    check: CheckResult | None = None
    state_bytes_per_sequence: int = 0
    topk: int | None = None
    selecting_tokens: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the time spent in this layer."""
        return self.tokens / self.total_s if self.total_s else 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all operations."""
        return sum(self.seconds.values())

    @property
    def selection_not_exercised(self) -> bool:
        """Whether rows were checked, and no step computed scores because the indexer selected every entry."""
        check = self.check
        if self.topk is None or check is None or not check.rows:
            return False
        return check.worst.selection is None


@define
class Report:
    """A whole replay, finished or interrupted.

    model: name of the model.
    backend: name of the backend.
    cache: name of the cache layout.
    seed: seed of the replay.
    block_size: records in a page of the window cache.
    max_num_batched_tokens: most tokens of a step.
    max_num_seqs: most requests that run at once.
    requests: requests of the trace.
    layers: one report for each layer type.
    finished: requests that were finished.
    steps: steps that ran.
    prefill_tokens: tokens served by the prefill parts of steps.
    decode_tokens: tokens served by the decode parts of steps.
    recomputed_tokens: tokens that were served again after a preemption.
    preemptions: number of preemptions.
    wall_s: duration in seconds.
    other_s: seconds outside the layers: making inputs, scheduling and metadata, checking.
    interrupted: whether Ctrl-C ended the run.
    trace: name of the trace.
    options: options of the backend.
    device: the device in words: "the CPU", or architecture and product.
    threads: threads of the CPU, cores that may be used, and where the number comes from; `text` has all in words.
    longest_request: tokens of the longest request, prompt and output.
    records_per_token: compressed records of all layers of the model for a token of context; 0 if not all layer types
    were run.
    readers: layers of the model that read the compressed cache of another, and were not run.
    model_topk: entries that the model's indexer selects, if the run selected another number; else None.
    ranks: what each rank holds, sends and found, if ranks share the compressed entries and the run was not interrupted.
    """

    model: str
    backend: str
    cache: str
    seed: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    requests: int
    layers: list[LayerReport]
    finished: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    wall_s: float = 0.0
    other_s: dict[str, float] = field(factory=dict)
    interrupted: bool = False
    trace: str = "generated"
    options: Mapping[str, str] = field(factory=dict)
    device: str = "the CPU"
    threads: Mapping[str, object] = field(factory=dict)
    longest_request: int = 0
    records_per_token: float = 0.0
    readers: int = 0
    model_topk: int | None = None
    ranks: RanksReport | None = None

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of compressed entries and index keys of all layers that were run, for a token of context."""
        return sum(layer.layers_in_model * layer.kv_bytes_per_token for layer in self.layers)

    @property
    def ok(self) -> bool:
        """Whether the replay ran to its end and no checked row failed, on all ranks."""
        ranks_ok = self.ranks is None or self.ranks.ok
        return not self.interrupted and ranks_ok and all(layer.check is None or layer.check.ok for layer in self.layers)

    def shares(self) -> list[float]:
        """Share of each layer type in the time of those that were run, one layer each."""
        return _shares([layer.total_s for layer in self.layers])

    def model_shares(self) -> list[float]:
        """The same with every layer of the model counted."""
        return _shares([layer.total_s * layer.layers_in_model for layer in self.layers])

    def operation_shares(self) -> list[dict[str, float]]:
        """Of each layer type, the share of each operation in the time of all layers of the model that were run."""
        seconds = [
            {name: value * layer.layers_in_model for name, value in layer.seconds.items()} for layer in self.layers
        ]
        total = sum(sum(values.values()) for values in seconds)
        return [{name: value / total if total else 0.0 for name, value in values.items()} for values in seconds]


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 0.0 for value in values]
