"""Names of vLLM that moved: in the newest wheel, if its Python files are given, and the command that says them."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from integrations import moved_internals

FOLDER = "NEWEST_ENGINES"
"""The variable with a folder of Python files of the newest wheels, as `make fetch-newest-engines` fills it."""


def test_the_newest_vllm_has_every_name() -> None:
    folder = Path(os.environ.get(FOLDER, "absent"))
    if not (folder / "vllm").is_dir():
        pytest.skip(f"{FOLDER} names no folder with vLLM's Python: see `make fetch-newest-engines`")

    looked = moved_internals.moved("vllm", folder)

    assert looked["moved"] == [], moved_internals.described("vllm", looked)


def test_a_name_that_moved_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A vLLM of links but for one file, which lacks a hook that layers override."""
    import vllm

    source, target = Path(vllm.__file__).parent, tmp_path / "vllm"
    metadata = f"vllm-{version('vllm')}.dist-info"
    shutil.copytree(source.parent / metadata, tmp_path / metadata)
    changed = Path("models", "deepseek_v4", "attention.py")
    folder = target
    for part in (None, *changed.parts[:-1]):
        folder = folder if part is None else folder / part
        folder.mkdir()
        for path in (source / folder.relative_to(target)).iterdir():
            if path.name not in ("__pycache__", *changed.parts):
                (folder / path.name).symlink_to(path)
    text = (source / changed).read_text(encoding="utf-8")
    assert "forward_mqa" in text
    (target / changed).write_text(text.replace("forward_mqa", "run_mqa"), encoding="utf-8")

    assert moved_internals.main([str(tmp_path)]) == 1

    *lines, verdict = capsys.readouterr().out.splitlines()
    assert lines == ["vllm.models.deepseek_v4.attention:DeepseekV4Attention.forward_mqa is not there"]
    assert verdict.startswith(f"vllm {version('vllm')}: of ")
    assert verdict.endswith(" names that dsv4attn_vllm relies on, 1 moved")


def test_a_folder_without_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moved_internals.main([str(tmp_path)]) == 2
    assert "has neither vllm nor sglang" in capsys.readouterr().out
