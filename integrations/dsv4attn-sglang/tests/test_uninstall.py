"""The wheel, built, installed and uninstalled by pip: which attention a scheduler of SGLang has before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from integrations.environment import Environment, check_wheel

CODE = """
import json, sys
from importlib.metadata import entry_points
import worker
result = worker.scheduler(builds=1)
own = sys.modules.get("dsv4attn_sglang")
points = [point.value for point in entry_points(group="sglang.srt.plugins") if point.name == "dsv4attn"]
said = any("attends for DeepSeek-V4 on dsv4attn" in line for line in result["lines"])
print("RESULT" + json.dumps([own and own.__file__, points, said, result["flash_mla"]]))
"""


def observed(environment: Environment) -> list[Any]:
    """What a fresh process that runs a model has.

    The file of this package, entry points, whether the log says that dsv4attn attends, and FlashMLA's operator that was
    called.
    """
    return list(json.loads(environment.run(CODE, Path(__file__).parent).rpartition("RESULT")[2]))


def test_an_installed_wheel_attends_and_an_uninstalled_one_leaves_nothing(tmp_path: Path) -> None:
    """See `fakes`, too."""
    used, unused = [["dsv4attn_sglang:register"], True, ""], [[], False, "sparse_decode_fwd"]

    check_wheel("dsv4attn-sglang", tmp_path, observed, used=used, unused=unused)
