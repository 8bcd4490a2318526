"""vLLM's own scheduler over the caches that its planner gives the layers of a configuration, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from engine import planned_caches
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


class Requests:
    """A scheduler, and requests that it schedules. pages: of all caches."""

    def __init__(self, config: Any, pages: int) -> None:
        caches = generate_scheduler_kv_cache_config([planned_caches(config, pages)])
        config.cache_config.num_gpu_blocks = caches.num_blocks
        block_size, hashed_size = resolve_kv_cache_block_sizes(caches, config)
        self._runs_ahead = config.scheduler_config.async_scheduling
        self._scheduler = (AsyncScheduler if self._runs_ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda *_: False),
            block_size=block_size,
            hash_block_size=hashed_size,
        )
        init_none_hash(sha256)
        self._hasher: Callable[..., Any] = get_request_block_hasher(hashed_size, sha256)

    def run(self, prompts: Mapping[str, Sequence[int]], tokens: int) -> tuple[dict[str, int], int]:
        """Schedule until all requests have so many tokens: tokens of each found in the cache, number of preemptions.

        prompts: by name of a request.
        """
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for name, prompt in prompts.items():
            request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
            self._scheduler.add_request(request)
        running: list[tuple[Any, ModelRunnerOutput]] = []
        cached, preemptions = {}, 0
        for _ in range(1000):
            step = self._scheduler.schedule()
            cached |= {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
            names = [*step.num_scheduled_tokens]
            # a step in the middle of a prompt generates nothing
            generated = [[] if self._scheduler.requests[name].is_prefill_chunk else [7] for name in names]
            running.append((step, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, generated)))
            preemptions += len(step.preempted_req_ids or ())
            if len(running) > self._runs_ahead or not names:
                self._scheduler.update_from_output(*running.pop(0))
            if not self._scheduler.has_unfinished_requests():
                return cached, preemptions
        raise AssertionError("some requests are never finished")
