"""A process in which SGLang's engine serves the rounds of a scenario: `python worker.py SCENARIO.json RESULTS.pt`.

SGLang's scheduler runs the model in a process of its own, as in a server, and loads the plugin by its entry point.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 256
COUNTED = {
    "num_retractions": "retractions",
    "spec_num_correct_drafts": "accepted",
    "spec_num_proposed_drafts": "drafts",
}
"""Names of numbers in what SGLang says about a request, and in the results."""


def main(scenario: Mapping[str, Any], out: str) -> None:
    """Serve the rounds, and save answers of each, and seconds until the engine was ready.

    scenario: environment, variables. options: of `Engine`. rounds: prompts (lists of tokens), tokens to generate, and
    of_prompts.
    """
    os.environ.update(scenario["environment"])
    os.environ.setdefault("SGLANG_PLUGINS", "dsv4attn")
    # else SGLang waits for a minute before it says what failed
    os.environ.update(HF_HUB_OFFLINE="1", SGLANG_CUDA_COREDUMP_BEFORE_CRASH="0")
    from sglang.srt.entrypoints.engine import Engine

    begin = time.perf_counter()
    engine = Engine(**scenario["options"])
    ready, rounds = time.perf_counter() - begin, []
    for step in scenario["rounds"]:
        sampling = {"temperature": 0, "max_new_tokens": step["tokens"], "ignore_eos": True}
        outputs = engine.generate(
            input_ids=step["prompts"],
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=0 if step["of_prompts"] else -1,
            top_logprobs_num=VOCABULARY,
        )
        rounds.append([answer_of(output, of_prompts=step["of_prompts"]) for output in outputs])
    torch.save({"rounds": rounds, "ready": ready}, out)
    engine.shutdown()


def answer_of(output: Mapping[str, Any], *, of_prompts: bool) -> dict[str, Any]:
    """What `small_model.answers` returns, of one output of SGLang: tokens, cached, logprobs, and numbers of `COUNTED`.

    A row of SGLang has (log-probability, token, text) of each token of the vocabulary. The first token of a prompt has
    an empty one, because no token is before it.
    """
    meta, tokens = output["meta_info"], [*output["output_ids"]]
    rows = [row for row in meta["input_top_logprobs"] if row] if of_prompts else []
    rows += meta["output_top_logprobs"][: len(tokens)]
    counted = {name: meta.get(key) or 0 for key, name in COUNTED.items()}
    return {"tokens": tokens, "cached": meta["cached_tokens"], "logprobs": table_of(rows), **counted}


def table_of(rows: list[list[tuple[float, int, Any]]]) -> Tensor:
    """Log-probabilities [n, vocabulary] in fp32; NaN where SGLang names none."""
    table = torch.full((len(rows), VOCABULARY), float("nan"))
    for line, row in zip(table, rows, strict=True):
        line[torch.tensor([entry[1] for entry in row])] = torch.tensor([entry[0] for entry in row])
    return table


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
