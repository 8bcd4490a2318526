"""The wheel, built, installed and uninstalled by pip: which attention a scheduler of SGLang has before and after."""

from __future__ import annotations

from pathlib import Path

from integrations.environment import check_wheel

CODE = """
from importlib.metadata import entry_points
import worker
served = worker.scheduler(builds=1)
points = [point.value for point in entry_points(group="sglang.srt.plugins") if point.name == "dsv4attn"]
said = any("attends for DeepSeek-V4 on dsv4attn" in line for line in served["lines"])
result = [points, said, served["flash_mla"]]
"""
"""In a process that runs a model: entry points, whether the log says so, and FlashMLA's operator that was called."""


def test_an_installed_wheel_attends_and_an_uninstalled_one_leaves_nothing(tmp_path: Path) -> None:
    """See `fakes`, too."""
    used, unused = [["dsv4attn_sglang:register"], True, ""], [[], False, "sparse_decode_fwd"]

    check_wheel("dsv4attn-sglang", tmp_path, CODE, Path(__file__).parent, used=used, unused=unused)
