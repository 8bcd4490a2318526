"""A pipeline-parallel rank of the engine of served.py, in a process that vLLM spawns: see `Rank`."""

from __future__ import annotations

import os

_OF_ENGINE = {name: value for name, value in os.environ.items() if name.startswith("DSV4ATTN_")}

import served
import torch

# conftest.py takes them away
os.environ.update(_OF_ENGINE)


class Rank:
    """For vLLM's option `worker_extension_cls`: it imports this module, with its fakes, before it makes a worker."""


torch.cuda.Event.synchronize = lambda _: None
_OPS = served._ops()
_OPS.__enter__()
