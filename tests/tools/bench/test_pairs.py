"""Layers of V4.1 are timed on three pairs of records in turn, and compared with their own times on 584 bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import AttentionCall, GatheredKeys
from dsv4attn.tools.bench.cases import PAIRS, cases_of
from dsv4attn.tools.bench.result import load
from dsv4attn.tools.bench.runner import MEASURED, REFUSED, WRONG, pair_means
from tests.tools.bench.sample_runs import row, run
from tests.tools.bench.test_runner import SIZE, Peer, Planted, right, runner


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_pairs_of_records_run_in_turn_and_have_their_speed_by_584(kernel: str) -> None:
    order: list[int] = []

    class Told(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:  # prefills on pages call it too
            order.append(_last_layout(call).record_bytes)
            super().decode(call)

    cases = cases_of([kernel], ["v41_r2"], SIZE)
    told = runner(Told(prefill_keys="paged"), [Peer(right)]).run(*cases)
    ours = [row for row in told if not row.is_peer]

    assert order[:3] == [584, 528, 288], "each is judged once"
    assert [*dict.fromkeys(order[3:])] == [584, 528, 288]
    assert [(row.state, row.records) for row in ours] == [(MEASURED, pair) for pair in PAIRS]
    medians = [row.median or 0.0 for row in ours]
    assert [row.vs_584 for row in ours] == [None, medians[0] / medians[1], medians[0] / medians[2]]
    peers = [(row.state, row.records, row.vs_584) for row in told if row.is_peer]
    assert peers == [(MEASURED, PAIRS[0], None), *((REFUSED, pair, None) for pair in PAIRS[1:])]
    assert [bool(row.vs) for row in ours] == [True, False, False]
    assert ours[1].bytes < ours[0].bytes > ours[2].bytes


def _last_layout(call: AttentionCall) -> KVCacheLayout:
    """The layout of the last segment's cache."""
    assert not isinstance(call.keys, GatheredKeys)
    return call.keys[-1].cache.layout


def test_a_wrong_result_on_one_pair_leaves_the_others_their_times() -> None:
    def on_288(call: AttentionCall) -> None:
        if _last_layout(call).name == "v41_fp4":
            call.out[0, 0] = 7.0

    told = runner(Planted(on_288)).run(*cases_of(["decode"], ["v41_r1"], SIZE))
    assert [row.state for row in told] == [MEASURED, MEASURED, WRONG]
    assert told[1].vs_584
    assert told[2].vs_584 is None


def test_without_a_time_on_584_nothing_is_compared_with_it() -> None:
    def on_584(call: AttentionCall) -> None:
        if _last_layout(call).name == "fp8_ds_mla":
            call.out[0, 0] = 7.0

    told = runner(Planted(on_584)).run(*cases_of(["decode"], ["v41_r1"], SIZE))
    assert [(row.state, row.vs_584) for row in told] == [(WRONG, None), (MEASURED, None), (MEASURED, None)]


def test_queries_of_v41_are_rotated_without_a_norm() -> None:
    (told,) = runner(ReferenceBackend()).run(*cases_of(["insert"], ["v41_r1"], SIZE))
    assert (told.state, told.reason) == (MEASURED, "")


def test_means_beside_584_are_by_kernel_and_records() -> None:
    pairs = [("a", "528/528", 1.0), ("b", "528/528", 4.0), ("a", "528/288", 3.0)]
    told = pair_means([row(), *(row(f"decode {name}", records=pair, vs_584=x) for name, pair, x in pairs)])
    assert told == {
        ("decode", "ours", "528/528"): pytest.approx(2.0),
        ("decode", "ours", "528/288"): pytest.approx(3.0),
    }


def test_files_from_before_v41_are_still_read(tmp_path: Path) -> None:
    saved = run([row()]).as_json()
    for each in saved["rows"]:
        del each["records"], each["vs_584"]
    (tmp_path / "old.json").write_text(json.dumps(saved), encoding="utf-8")

    (told,) = load(tmp_path / "old.json", "--from").rows
    assert (told.records, told.vs_584) == ("", None)
