"""SGLang finds the plugin by its entry point, in every process; what it then does, and does not do. Fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import worker

HERE = Path(__file__).parent
REPLACED = "dsv4attn-sglang: replaced "


def run(call: str, **environ: str) -> dict[str, Any]:
    """The result of a call of `worker` in a fresh interpreter."""
    code = f"import json, worker; result = worker.{call}; print('RESULT' + json.dumps(result))"
    arguments = {name: value for name, value in os.environ.items() if not name.startswith("DSV4ATTN_")}
    path = os.pathsep.join([str(HERE), str(HERE.parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**arguments, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT")[2])
    return result


def test_the_wheel_has_one_entry_point_and_needs_no_engine() -> None:
    wheel = distribution("dsv4attn-sglang")

    assert [(e.group, e.name, e.value) for e in wheel.entry_points] == [
        ("sglang.srt.plugins", "dsv4attn", "dsv4attn_sglang:register")
    ]
    assert wheel.requires == ["dsv4attn>=0.1"]


def test_a_process_without_a_model_is_left_as_it_is() -> None:
    result = run("plain()")

    loaded = {name.partition(".")[0] for name in result["new"]} - sys.stdlib_module_names
    assert loaded <= {"attr", "attrs", "dsv4attn", "dsv4attn_sglang"}
    assert "dsv4attn.selection" not in result["new"]
    assert result["hooks"] == []


def test_a_spawned_scheduler_attends_on_dsv4attn_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    monkeypatch.syspath_prepend(str(HERE))
    with get_context("spawn").Pool(1) as pool:
        result = pool.apply(worker.scheduler)

    assert result["flash_mla"] == ""
    said = [line for line in result["lines"] if line.startswith("dsv4attn-sglang")]
    assert len([line for line in said if "attends for DeepSeek-V4 on dsv4attn" in line]) == 1
    [replaced] = [line for line in said if line.startswith(REPLACED)]
    assert replaced.removeprefix(REPLACED).split(", ") == [
        f"sglang.kernels.ops.attention.flash_mla_interface.{name}"
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    ]
    # the first model is a window alone, the two others are alike
    why = "64 heads: reference: asked for by name (environment variable DSV4ATTN_BACKEND)"
    assert [line for line in said if "asked for" in line] == [
        f"dsv4attn-sglang: decode, {why}; swa",
        f"dsv4attn-sglang: prefill, {why}; up to 128 of the gathered rows",
        f"dsv4attn-sglang: decode, {why}; swa, c4a, c128a",
        f"dsv4attn-sglang: prefill, {why}; up to 640 of the gathered rows",
    ]
    applied = [line for line in result["lines"] if "plugin=dsv4attn, dist=dsv4attn-sglang" in line]
    assert len(applied) == 4
    # next to vLLM's Python, SGLang looks for its compiled part
    assert not [line for line in result["lines"] if "Failed to" in line and "vllm._C" not in line]


@pytest.mark.parametrize("off", ["variable", "uninstalled"])
def test_switched_off_or_uninstalled_sglang_attends_on_flash_mla(off: str) -> None:
    environ = {"DSV4ATTN_SGLANG": "0"} if off == "variable" else {}
    result = run(f"scheduler(hidden={off == 'uninstalled'}, builds=1)", **environ)

    assert result["flash_mla"] == "sparse_decode_fwd"
    assert not [line for line in result["lines"] if "plugin=dsv4attn" in line]
    assert "dsv4attn_sglang.hooks" not in result["modules"]
