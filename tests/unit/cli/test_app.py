"""Options of the `headrace` command itself, and systems on which it does not run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace import __version__
from headrace_cli.app import main
from tests.unit.cli.test_cli import headrace


def test_version_is_that_of_the_client() -> None:
    assert headrace("--version") == (0, f"headrace {__version__}\n")


def test_windows_gets_a_sentence_instead_of_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace_cli.app.os", SimpleNamespace(name="nt"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "run on Linux, on macOS and in WSL" in capsys.readouterr().err


def test_up_refuses_two_different_ports_of_the_gateway(tmp_path: Path) -> None:
    status, text = headrace("up", "--data-dir", str(tmp_path), "--port", "8100", "--set", "gateway.port=8200")
    assert status == 2
    assert "--port 8100: --set gateway.port=8200 differs; leave one of them out" in text
