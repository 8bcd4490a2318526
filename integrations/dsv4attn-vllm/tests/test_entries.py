"""The entries that requests selected, by steps that are made up; test_engine_run.py records in vLLM's own engine."""

from __future__ import annotations

import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsv4attn_vllm.entries import UNKNOWN, Recorder, check_entries
from dsv4attn_vllm.guard import RefusedError
from torch import Tensor

BLOCK, TOPK = 8, 2
LAYERS = ("model.layers.2.attn", "model.layers.4.attn")


class Steps:
    """Steps of a runner with a recorder. The entries of a token name the step in which it was run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.recorder = Recorder(folder, TOPK, max_tokens=64, device="cpu")
        for prefix in LAYERS:
            self.recorder.add(prefix)
        self.req_states = SimpleNamespace(req_id_to_index={}, total_len=None, all_token_ids=None)
        self.execute_model_state: Any = None
        self._execute = self.recorder.around(type(self).execute_model)

    def execute_model(self, work: Any) -> None:
        """What vLLM does: run the layers, and leave the state of the step."""
        if not work.requests:
            return
        counts = [count for *_, count in work.requests]
        self.number += 1
        for i, prefix in enumerate(LAYERS):
            rows = torch.full((sum(counts) + 3, TOPK + 1), 10 * self.number + i, dtype=torch.int32)
            self.recorder.keep(prefix, rows, BLOCK)
        positions = [first + i for _, _, first, count in work.requests for i in range(count)]
        batch = SimpleNamespace(
            req_ids=[name for name, *_ in work.requests],
            num_reqs=len(counts),
            query_start_loc=torch.tensor([0, *counts]).cumsum(0),
            positions=torch.tensor([*positions, 0, 0, 0]),
            input_ids=torch.tensor(
                [token for name, _, first, count in work.requests for token in tokens_of(name)[first : first + count]]
                + [0, 0, 0]
            ),
        )
        table = torch.tensor([blocks for _, blocks, *_ in work.requests])
        metadata = {LAYERS[0]: SimpleNamespace(block_table=table)}
        self.execute_model_state = SimpleNamespace(input_batch=batch, attn_metadata=metadata)

    def step(self, *requests: tuple[str, list[int], int, int], finished: tuple[str, ...] = ()) -> None:
        """Run a step. requests: (name, blocks, position of the first token, number of tokens)."""
        for name, *_ in requests:
            self.req_states.req_id_to_index.setdefault(name, len(self.req_states.req_id_to_index))
        if requests:
            self.describe(0)
        self._execute(self, SimpleNamespace(requests=requests, finished_req_ids=finished))

    def finish(self, name: str, tokens: int) -> dict[int, Tensor]:
        """The entries of a request that ends with so many tokens, of which the last was not run."""
        self.describe(tokens)
        self.step(finished=(name,))
        saved = torch.load(self.folder / f"{name}.pt")
        assert saved["tokens"].tolist() == tokens_of(name)[:tokens]
        del self.req_states.req_id_to_index[name]
        return saved["entries"]

    def describe(self, tokens: int) -> None:
        """What vLLM knows of its requests. tokens: so many each of them has."""
        table = torch.zeros(9, 32, dtype=torch.int64)
        for name, slot in self.req_states.req_id_to_index.items():
            table[slot] = torch.tensor(tokens_of(name))
        self.req_states.total_len = SimpleNamespace(gpu=torch.full((9,), tokens))
        self.req_states.all_token_ids = SimpleNamespace(gpu=table)


def tokens_of(name: str) -> list[int]:
    """The tokens of a request: the same of all but one."""
    return [*range(100, 132)] if name == "other" else [*range(32)]


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "entries")


def steps_of(entries: dict[int, Tensor]) -> list[int]:
    """The step in which each token was run, by the entries of both layers."""
    assert [*entries] == [2, 4]
    assert torch.equal(entries[2] + (entries[2] != UNKNOWN), entries[4])
    assert (entries[2] == entries[2][:, :1]).all()
    return entries[2][:, 0].tolist()


def test_rejected_drafts_and_hits_in_the_prefix_cache(steps: Steps) -> None:
    steps.step(("a", [3, 5, 0], 0, 7), ("b", [1, 0, 0], 0, 2))
    # two of three drafts are rejected, and one of the next three
    steps.step(("a", [3, 5, 0], 7, 4), ("b", [1, 0, 0], 2, 1))
    steps.step(("a", [3, 5, 0], 9, 4))
    # a prefix of eight tokens; and a request that is preempted, and computed again in other blocks
    steps.step(("c", [3, 6, 0], 8, 2), ("b", [7, 0, 0], 0, 3))

    assert steps_of(steps.finish("a", 13)) == [10] * 7 + [20] * 2 + [30] * 3
    assert steps_of(steps.finish("c", 11)) == [10] * 7 + [20] + [40] * 2
    assert steps_of(steps.finish("b", 4)) == [40] * 3


def test_a_block_that_came_from_elsewhere_is_unknown(steps: Steps) -> None:
    steps.step(("a/1", [4, 2], 8, 3))
    steps.describe(12)

    steps.recorder.write_all(steps.req_states)

    assert steps_of(torch.load(steps.folder / "a_1.pt")["entries"]) == [UNKNOWN] * 8 + [10] * 3
    assert [file.name for file in steps.folder.iterdir()] == ["a_1.pt"]


@pytest.mark.parametrize(("first", "second"), [([3, 5, 6], [3, 7, 2]), ([9, 5, 6], [8, 5, 2]), ([9, 5, 6], [5, 8, 2])])
def test_a_block_that_a_connector_filled_has_nothing_of_an_earlier_request(
    steps: Steps, first: list[int], second: list[int]
) -> None:
    """The prefix of the second request comes from a connector, into blocks that another request had before."""
    steps.step(("other", first, 0, 18))
    steps.finish("other", 18)
    steps.step(("a", second, 16, 3))

    assert steps_of(steps.finish("a", 20)) == [UNKNOWN] * 16 + [20] * 3


def test_requests_of_vllms_warm_up_have_no_file(steps: Steps) -> None:
    package = Path(find_spec("vllm").submodule_search_locations[0])
    text = "".join(
        file.read_text()
        for folder in ("v1/worker/gpu", "model_executor/warmup")
        for file in (package / folder).glob("*.py")
    )
    prefixes = set(re.findall(r'req_id_prefix(?:: str)? ?= ?"(\w+)"', text))
    names = ["_warmup_0_", *(f"{prefix}_{phase}_" for prefix in prefixes for phase in ("decode", "prefill"))]

    for name in names:
        steps.step((name, [3, 0, 0], 0, 4), ("a", [5, 0, 0], 0, 4))
        steps.describe(5)
        steps.step(finished=(name, "a"))
    assert [file.name for file in steps.folder.iterdir()] == ["a.pt"]
    assert prefixes >= {"_v2_mixed_warmup", "_sparse_mla_v2_warmup"}
    assert 'f"_warmup_{i}_"' in text
    assert 'f"{req_id_prefix}_decode_"' in text


def test_names_of_clients_become_names_of_files(steps: Steps) -> None:
    names = ["a/b", "a" * 300, "a" * 299 + "b"]
    for name in names:
        steps.step((name, [3, 0, 0], 0, 4))
        steps.describe(5)
        steps.step(finished=(name,))

    files = sorted(file.name for file in steps.folder.iterdir())
    assert files[0] == "a_b.pt"
    assert [file.split("-")[0] for file in files[1:]] == ["a" * 40] * 2


def test_blocks_of_equal_prefixes_are_those_of_any_request(steps: Steps) -> None:
    """Two requests computed the same prefix, and a third one hits a block of each."""
    steps.step(("a", [3, 5], 0, 16), ("b", [4, 6], 0, 16))
    steps.step(("c", [3, 6, 7], 16, 2))

    assert steps_of(steps.finish("c", 19)) == [10] * 16 + [20] * 2


@pytest.mark.parametrize(
    ("parts", "v41", "microbatches", "stages", "why"),
    [
        ({"indexer"}, True, False, 1, "unset for DeepSeek-V4.1"),
        ({"compressor"}, False, False, 1, "DSV4ATTN_VLLM_PARTS=indexer,compressor"),
        ({"indexer"}, False, True, 1, "no microbatches"),
        ({"indexer"}, False, False, 2, "one pipeline stage"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    parts: set[str], *, v41: bool, microbatches: bool, stages: int, why: str
) -> None:
    parallel = SimpleNamespace(use_ubatching=microbatches, pipeline_parallel_size=stages)
    with pytest.raises(RefusedError, match=f"DSV4ATTN_VLLM_ENTRIES: expected .*{why}"):
        check_entries(SimpleNamespace(parallel_config=parallel), frozenset(parts), v41=v41)


def test_a_folder_that_takes_no_file_is_refused_before_a_request_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False, pipeline_parallel_size=1))
    (tmp_path / "file").touch()
    for folder, refused in ((tmp_path / "new" / "entries", False), (tmp_path / "file" / "entries", True)):
        monkeypatch.setenv("DSV4ATTN_VLLM_ENTRIES", str(folder))
        with pytest.raises(RefusedError, match="expected a folder to write files in") if refused else nullcontext():
            check_entries(vllm_config, frozenset({"indexer"}), v41=False)
    assert [*(tmp_path / "new" / "entries").iterdir()] == []
