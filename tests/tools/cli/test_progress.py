"""What commands show on stderr while they work."""

from __future__ import annotations

import pytest

from dsv4attn.tools.cli.progress import working


def test_a_terminal_shows_what_a_command_is_doing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal then
    with working("looking at plugins", shown=True):
        pass

    assert "looking at plugins" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [True, False])
def test_a_pipe_and_json_show_nothing(
    shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if not shown:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with working("looking at plugins", shown=shown):
        pass

    assert capsys.readouterr().err == ""
