"""Options of the `headrace` command itself, and systems on which it does not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace import __version__
from tests.unit.cli.test_cli import headrace


def test_version_is_that_of_the_client() -> None:
    assert headrace("--version") == (0, f"headrace {__version__}\n")


_WITHOUT_UNIX = """
import sys
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # as on Windows, where an import of them fails
{imports}
sys.platform = "win32"
sys.argv = ["headrace", "up"]
{run}
"""


@pytest.mark.parametrize(
    ("imports", "run", "status", "message"),
    [
        ("from headrace_cli.app import main", "main()", 2, "run on Linux, on macOS and in WSL; on Windows itself, use"),
        ("from headrace_scorer.__main__ import SERVICE", "SERVICE.main()", 1, "headrace scorer: services run on Linux"),
        ("from headrace import AsyncClient, Client", "Client('http://127.0.0.1:9').close()", 0, ""),
    ],
    ids=["command", "service", "client"],
)
def test_windows_gets_a_sentence_instead_of_a_traceback(imports: str, run: str, status: int, message: str) -> None:
    code = _WITHOUT_UNIX.format(imports=imports, run=run)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (status, bool(message)), ended.stderr
    assert message in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train rows.jsonl", "rows.jsonl: ALGORITHM is missing; write for example `headrace train sft rows.jsonl`"),
        ("train topic:experiences", "ALGORITHM is missing; write for example `headrace train sft topic:experiences`"),
        ("train sft", "headrace train sft: SOURCE is missing; name files or folders of rows, or topic:experiences"),
        ("train no.toml", "recipe no.toml: cannot be read: No such file or directory; name an existing file"),
        ("trinity convert no.yaml", "no.yaml: cannot be read: No such file or directory; name a YAML file of Trinity"),
    ],
)
def test_missing_files_and_arguments_are_named(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = headrace(*arguments.split())
    assert status == 2
    assert message in text


def test_up_refuses_two_different_ports_of_the_gateway(tmp_path: Path) -> None:
    status, text = headrace("up", "--data-dir", str(tmp_path), "--port", "8100", "--set", "gateway.port=8200")
    assert status == 2
    assert "--port 8100: --set gateway.port=8200 differs; leave one of them out" in text


def test_commands_read_headrace_toml_of_their_folder_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("HEADRACE_CONFIG", "HEADRACE_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    Path("headrace.toml").write_text('data_dir = "here"')
    Path("other.toml").write_text('data_dir = "other"')

    assert f"Headrace is not up in {tmp_path}/here" in headrace("status")[1]
    assert "headrace.toml: exists already" in headrace("config", "init")[1]
    monkeypatch.setenv("HEADRACE_CONFIG", "other.toml")
    assert f"Headrace is not up in {tmp_path}/other" in headrace("status")[1]
    monkeypatch.delenv("HEADRACE_CONFIG")
    Path("headrace.toml").write_text("[no.such")
    status, text = headrace("up")
    assert (status, "headrace.toml" in text) == (2, True), text
    status, text = headrace("up", "--config", "absent.toml")
    assert (status, "absent.toml" in text) == (2, True), text
