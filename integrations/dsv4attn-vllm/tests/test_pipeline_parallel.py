"""Two pipeline-parallel stages of vLLM's own engine on a CPU, against transformers' DeepSeek-V4 in fp32.

served.py says what is faked. Each stage is a process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_model import checkpoint, logprobs, of_stages
from test_engine_run import LONG, MIDDLE, SHORT, SIZES_OF_MODEL, check_answers, serve

RANKS = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "worker_extension_cls": "served_rank.Rank"}


def test_stages_answer_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts, two of them in chunks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    addresses = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    for name, value in {**addresses, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(name, value)
    model, prompts = checkpoint(tmp_path, of_stages(SIZES_OF_MODEL)), [SHORT, LONG, MIDDLE]

    [answers], _, log = serve(tmp_path, "reference", [prompts], num_gpu_blocks_override=400, **RANKS)

    for stage in (0, 1):
        assert any(f"Worker_PP{stage}" in line and "decode runs on reference" in line for line in log.splitlines())
    check_answers(logprobs(model, prompts, answers), answers)
