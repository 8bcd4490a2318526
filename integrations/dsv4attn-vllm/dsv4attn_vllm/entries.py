"""`DSV4ATTN_VLLM_ENTRIES=FOLDER`: a file for each request with the entries that its tokens attended to, for a trainer.

A layer of ratio 4 copies its selection into a buffer of its own, in a captured graph too. After a step, the rows go to
the host, where they are kept by block of vLLM's cache. So a request that finds a prefix in vLLM's cache finds the
entries of these tokens as well, and a token that is computed again, after preemption or a rejected draft, replaces its
row.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from attrs import define
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank

from dsv4attn.integrations.variables import VLLM_ENTRIES
from dsv4attn_vllm.guard import GUARD, RefusedError, is_before_0_33
from dsv4attn_vllm.parts import INDEXER, VARIABLE

_WARM_UP = re.compile(r"_(\w+_)?warmup_(\d+|decode|prefill)_")
"""Names of requests by which vLLM warms up its kernels on a GPU (`vllm/v1/worker/gpu/warmup.py` and its callers)."""
_LONGEST_NAME = 200
"""Bytes of the name of a request that is the name of its file."""
UNKNOWN = -2
"""In the row of a token whose entries nobody recorded: its block came from a connector, as for an offloaded cache."""


def folder_of_entries() -> str:
    """The folder that the variable names, or an empty string."""
    return os.environ.get(VLLM_ENTRIES, "")


def check_entries(vllm_config: Any, parts: frozenset[str], *, v41: bool) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Raise RefusedError for what cannot be recorded rightly. parts: those that run on dsv4attn."""
    name, cure = f"environment variable {VLLM_ENTRIES}", f"leave {VLLM_ENTRIES} out"
    refused = {
        "unset for DeepSeek-V4.1, some of whose layers run on a part of the tokens": v41,
        "vLLM 0.33 or newer": is_before_0_33(GUARD.installed()),
        f"the indexer on dsv4attn, whose entries ascend: {VARIABLE}=indexer,compressor": INDEXER not in parts,
        "no microbatches": vllm_config.parallel_config.use_ubatching,
        "one pipeline stage": vllm_config.parallel_config.pipeline_parallel_size > 1,
    }
    for expected in (expected for expected, is_refused in refused.items() if is_refused):
        raise RefusedError(name, expected=expected, actual=folder_of_entries(), cure=cure)
    folder = Path(folder_of_entries())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # now, and not when the first request has ended
        raise RefusedError(name, expected="a folder to write files in", actual=str(error), cure=cure) from error


def _file_name(request: str) -> str:
    """The name of a request as one of a file. Clients may choose long ones, and a file system has a limit of 255."""
    name = request.replace("/", "_")
    return name if len(name.encode()) <= _LONGEST_NAME else f"{name[:40]}-{sha256(name.encode()).hexdigest()}"


@define(eq=False)
class _Block:
    """What the tokens in a block of vLLM's cache selected, when a step last ran them.

    before: hash of all tokens before the block. tokens: [tokens of a block] int32, -1 where none was run.
    rows: [tokens of a block, layers, K] int32.
    """

    before: int
    tokens: Tensor
    rows: Tensor


def _hash_of(tokens: Tensor) -> int:
    """Hash of tokens [n] int32 on the CPU."""
    return hash(tokens.numpy().tobytes())


class Recorder:
    """What the layers of this process select. One for all layers.

    folder: of the files. topk: K. max_tokens: of a step. device: of the layers.
    """

    def __init__(self, folder: Path, topk: int, max_tokens: int, device: str) -> None:
        self._folder, self._shape, self._device = folder, (max_tokens, topk), device
        self._buffers: dict[str, Tensor] = {}
        self._block_tokens = 0
        self._blocks: dict[int, _Block] = {}
        self._requests: dict[str, tuple[list[int], int]] = {}
        """Of each request its blocks, and the number of its tokens that were run."""

    def add(self, prefix: str) -> None:
        """Make the buffer of a layer."""
        self._buffers[prefix] = torch.full(self._shape, UNKNOWN, dtype=torch.int32, device=self._device)

    def keep(self, prefix: str, topk_indices: Tensor, block_tokens: int) -> None:
        """Copy what a layer selected. topk_indices: [T, >= K] int32. block_tokens: of a block of its cache."""
        self._block_tokens = block_tokens
        self._buffers[prefix][: len(topk_indices)].copy_(topk_indices[:, : self._shape[1]])

    def take(self, batch: Any, by_prefix: Any, states: Any) -> None:  # noqa: ANN401
        """Copy the rows of a step to the host.

        batch: vLLM's InputBatch. by_prefix: metadata of its layers. states: vLLM's RequestState.
        """
        bounds, size = batch.query_start_loc[: batch.num_reqs + 1].tolist(), self._block_tokens
        rows = torch.stack([buffer[: bounds[-1]] for buffer in self._buffers.values()], 1).cpu()
        positions, ids = batch.positions[: bounds[-1]].tolist(), batch.input_ids[: bounds[-1]].int().cpu()
        table = by_prefix[next(iter(self._buffers))].block_table[: batch.num_reqs].cpu()
        for i, name in enumerate(batch.req_ids):
            row, last = bounds[i : i + 2]
            if row == last:
                continue
            tokens = positions[last - 1] + 1
            blocks = table[i, : -(-tokens // size)].tolist()
            first, of_step, prefix = positions[row], ids[row:last], None
            while row < last:
                number, place = divmod(positions[row], size)
                count = min(size - place, last - row)
                if not place or blocks[number] not in self._blocks:
                    if prefix is None:
                        of_state = states.all_token_ids.gpu[states.req_id_to_index[name], :first]
                        prefix = torch.cat([of_state.int().cpu(), of_step])
                    unset = torch.full((size,), -1, dtype=torch.int32, device="cpu")
                    before = _hash_of(prefix[: number * size])
                    self._blocks[blocks[number]] = _Block(before, unset, self._unknown())
                block = self._blocks[blocks[number]]
                block.tokens[place : place + count] = ids[row : row + count]
                block.rows[place : place + count] = rows[row : row + count]
                row += count
            self._requests[name] = blocks, tokens

    def _unknown(self) -> Tensor:
        """The rows of a block before any token in it was run."""
        shape = (self._block_tokens, len(self._buffers), self._shape[1])
        return torch.full(shape, UNKNOWN, dtype=torch.int32, device="cpu")

    def write(self, name: str, states: Any) -> None:  # noqa: ANN401 - vLLM's RequestState
        """Write the file of a request, while vLLM knows its tokens. Requests of vLLM's warm-up have none."""
        slot = states.req_id_to_index.get(name)
        if slot is None or name not in self._requests or _WARM_UP.fullmatch(name):
            return
        blocks, run = self._requests[name]
        count = int(states.total_len.gpu[slot])
        # the last token was sampled, and not run; rejected drafts were run after it
        tokens, run = states.all_token_ids.gpu[slot, :count].cpu(), min(run, count - 1)
        entries = torch.cat(self._parts(blocks, tokens[:run].int()))[:run]
        numbers = [int(re.search(r"layers\.(\d+)\.", prefix)[1]) for prefix in self._buffers]  # type: ignore[index]
        of_layers = {number: entries[:, i].clone() for i, number in enumerate(numbers)}
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{_file_name(name)}.pt"
        torch.save({"tokens": tokens, "entries": of_layers}, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)

    def _parts(self, blocks: list[int], tokens: Tensor) -> list[Tensor]:
        """The rows of a request's blocks. A block that a connector filled may still have those of another request."""
        parts, size = [], self._block_tokens
        for i, number in enumerate(blocks):
            block, of_block = self._blocks.get(number), tokens[i * size : (i + 1) * size]
            is_known = (
                block is not None
                and block.before == _hash_of(tokens[: i * size])
                and torch.equal(block.tokens[: len(of_block)], of_block)
            )
            parts.append(block.rows if block is not None and is_known else self._unknown())
        return parts

    def write_all(self, states: Any) -> None:  # noqa: ANN401
        """Write the files of all requests that vLLM knows."""
        for name in self._requests:
            self.write(name, states)

    def around(self, execute_model: Any) -> Any:  # noqa: ANN401 - a method of vLLM's runner
        """The method with files of finished requests before a step, and the rows of the step after it."""

        def execute(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            for name in scheduler_output.finished_req_ids:
                self.write(name, runner.req_states)
                self._requests.pop(name, None)
            runner.execute_model_state = None
            output = execute_model(runner, scheduler_output, *args, **kwargs)
            state = runner.execute_model_state
            is_step = state is not None and state.input_batch.req_ids[0] in runner.req_states.req_id_to_index
            if is_step and isinstance(state.attn_metadata, dict):
                self.take(state.input_batch, state.attn_metadata, runner.req_states)
            return output

        return execute


_recorder: Recorder | None = None


def recorder_of(vllm_config: Any, prefix: str, topk: int) -> Recorder | None:  # noqa: ANN401
    """The recorder of this process with a buffer for a layer, if the variable asks for one. topk: K of the layer.

    None on the other ranks of tensor parallelism, which select the same entries as the first.
    """
    global _recorder  # noqa: PLW0603 - one model is served by a process
    if not folder_of_entries() or get_tensor_model_parallel_rank():
        return None
    if _recorder is None:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        device, tokens = vllm_config.device_config.device_type, vllm_config.scheduler_config.max_num_batched_tokens
        _recorder = Recorder(Path(folder_of_entries()), topk, tokens, device)
        GPUModelRunner.execute_model = _recorder.around(GPUModelRunner.execute_model)
    _recorder.add(prefix)
    return _recorder


def write_entries(worker: Any) -> None:  # noqa: ANN401 - vLLM's Worker
    """Write the files of requests of which vLLM's worker has not heard the end: `llm.collective_rpc(write_entries)`."""
    if _recorder is not None:
        _recorder.write_all(worker.model_runner.req_states)
