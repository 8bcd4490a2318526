"""Replays that a pool of ranks runs together: `tests/core/context_parallel/context_ranks.py` has the pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.tools.replay.engine import Replay, ReplayConfig
from dsv4attn.tools.replay.over_ranks import MeteredContext
from dsv4attn.tools.replay.report import as_json
from dsv4attn.tools.replay.results import Report
from tests.testing.mutants_rank_ops import Merges
from tests.tools.replay.small import GEOMETRY, requests_of

LENGTHS = ((1, 3), (90, 4), (33, 3))
"""Few steps, in which every rank owns entries, and an indexer leaves entries out in each step."""
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 32, "block_size": 4}


class WrongPart(MeteredContext):
    """The last rank sends zeros for its attention."""

    def start(self, mine: Tensor, what: str, **into: Tensor | None) -> Callable[[], Tensor]:
        last = self.ownership.rank == self.ownership.size - 1
        return super().start(mine * 0 if last and what == "attention" else mine, what, **into)


class WrongCandidates(MeteredContext):
    """The last rank proposes its first entry alone."""

    def start(self, mine: Tensor, what: str, **into: Tensor | None) -> Callable[[], Tensor]:
        if self.ownership.rank == self.ownership.size - 1 and what == "candidates":
            mine[0, :, 1:] = -1
        return super().start(mine, what, **into)


class OtherOrder(MeteredContext):
    """The last rank takes the attention of the others for its own."""

    def start(self, mine: Tensor, what: str, **into: Tensor | None) -> Callable[[], Tensor]:
        finish = super().start(mine, what, **into)
        last = self.ownership.rank == self.ownership.size - 1

        def others() -> Tensor:
            result = finish()
            return result.copy_(result[:1].clone().expand_as(result))

        return others if last and what == "attention" else finish


def served(
    context: MeteredContext, *lengths: tuple[int, int], backend: ReferenceBackend | None = None, **config: Any
) -> Report:
    settings = ReplayConfig(**SETTINGS, **config)
    return Replay(GEOMETRY, backend or ReferenceBackend(), requests_of(*lengths), settings, context).run()


def sound(group: Any, interleave: int, **config: Any) -> None:
    """Every rank passes all checks that one rank passes, holds its part, and sends what the formula says."""
    context = MeteredContext(group, interleave)
    report = served(context, *LENGTHS, check_rows=2, **config)

    assert report.ok, report
    assert report.ranks is not None
    assert (report.ranks.size, report.ranks.interleave) == (group.size(), interleave)
    assert [rank.rank for rank in report.ranks.ranks] == [*range(group.size())]
    swa, c4a, c128a = report.layers
    assert c4a.check is not None
    assert None not in [*c4a.check.worst], "each stage is compared"
    element = 4 if config.get("cache") == "fp32" else 2
    for rank in report.ranks.ranks:
        assert [layer.rows for layer in rank.layers] == [x.check.rows for x in (swa, c4a, c128a) if x.check]
        assert [layer.traffic.attention for layer in rank.layers] == [0, *[4 * (32 * element + 4)] * 2]
        formula = 4 * (32 * element + 4)
        first, *others = [layer.traffic for layer in rank.layers]
        assert first.attention_sent + first.keys_sent == 0
        # prefill that sends keys sends its share of rows, and no lse
        for traffic in others:
            assert traffic.attention_sent == formula or 0 < traffic.attention_sent + traffic.keys_sent < formula
            assert (traffic.attention_sent == formula) is (traffic.keys_sent == 0)
        assert others[1].keys_sent > 0
        assert [layer.traffic.selection for layer in rank.layers] == [0, 8 * 6, 0]
        assert [layer.traffic.selection_sent for layer in rank.layers] == [0, 8 * 6, 0]
        assert [bool(layer.digest) for layer in rank.layers] == [False, True, True]
    assert as_json(report)["ranks"]["ranks"][-1]["layers"][1]["kind"] == "c4a"


def bug_is_named(
    group: Any,
    bug: type[MeteredContext],
    stages: set[str],
    differing: list[str],
    backend: ReferenceBackend | None = None,
) -> None:
    """The bug is named by the rows of a rank that has it, or by bits that differ."""
    report = served(bug(group), (33, 2), (58, 3), check_rows=4, backend=backend)
    assert not report.ok
    assert report.ranks is not None
    assert report.ranks.differing == differing
    said = " ".join(line for rank in report.ranks.ranks for layer in rank.layers for line in layer.failures)
    assert all(stage in said for stage in stages), said


REPLAYS: dict[int, dict[str, Callable[[Any], None]]] = {
    2: {
        "replay-fp8": partial(sound, interleave=1),
        "replay-wrong-part": partial(bug_is_named, bug=WrongPart, stages={"out", "lse"}, differing=[]),
        "replay-wrong-candidates": partial(bug_is_named, bug=WrongCandidates, stages={"selection"}, differing=[]),
        "replay-other-order": partial(bug_is_named, bug=OtherOrder, stages={"out"}, differing=["c4a", "c128a"]),
    },
    3: {
        "replay-fp32": partial(sound, interleave=4, cache="fp32"),
        # the backend merges by itself
        "replay-merged": partial(sound, interleave=1, cache="fp32", backend=Merges()),
        "replay-merged-wrong": partial(
            bug_is_named, bug=WrongPart, stages={"out", "lse"}, differing=[], backend=Merges()
        ),
    },
}
"""By the size of the group that runs them: one size each, as a replay takes a second on each rank."""
