"""Every form of the indexer's scores, compiled for Hopper: limits it breaks, and programs of a multiprocessor, as JSON.

A program of its own, since a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json

from dsv4attn.backends._triton.compiling.aot import Outcome, compile_all
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends.sm90 import index


def read(outcome: Outcome) -> dict[str, object]:
    programs = outcome.resources.occupancy if outcome.resources else 0
    return {"reasons": [str(reason) for reason in outcome.reasons], "programs": programs}


if __name__ == "__main__":
    print(json.dumps([read(outcome) for outcome in compile_all(index.variants(logits=True), TARGETS["sm_90"])]))
