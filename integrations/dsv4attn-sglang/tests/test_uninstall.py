"""The wheel, built, installed and uninstalled by pip: which attention a scheduler of SGLang has before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from integrations.environment import Environment, build_wheel

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


def found(environment: Environment) -> list[Any]:
    """What a fresh process that runs a model has.

    The file of this package, entry points, whether the log says that dsv4attn attends, and FlashMLA's operator that was
    called.
    """
    return list(json.loads(environment.run(CODE, Path(__file__).parent).rpartition("RESULT")[2]))


def test_an_installed_wheel_attends_and_an_uninstalled_one_leaves_nothing(tmp_path: Path) -> None:
    """Linked, not installed: SGLang and all other packages. dsv4attn is that of this repository; see `fakes`, too."""
    wheel, environment = build_wheel("dsv4attn-sglang", tmp_path), Environment(tmp_path / "environment")

    environment.pip("install", "--no-deps", "--no-index", str(wheel))

    file, *rest = found(environment)
    assert Path(file) == environment.packages / "dsv4attn_sglang" / "__init__.py"
    assert rest == [["dsv4attn_sglang:register"], True, ""]

    environment.pip("uninstall", "-y", "dsv4attn-sglang")

    assert [path.name for path in environment.packages.iterdir() if "dsv4attn_sglang" in path.name] == []
    assert found(environment) == [None, [], False, "sparse_decode_fwd"]
