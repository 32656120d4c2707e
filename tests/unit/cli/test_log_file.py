"""A service's log on a disk that refuses: lines are left out and counted, never cut, and no writer waits."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from unittest import mock

from headrace_operations.supervisor.health import failed_checks
from headrace_operations.supervisor.log_file import LogFile


def test_lines_lost_to_a_full_disk_are_counted(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "x.log", 10_000, 1)
    log.write(b"one\n")
    refusal = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(LogFile, "_append", side_effect=refusal):
        log.write(b"two\n")
        log.write(b"three\n")
    log.write(b"four\n")
    assert log.path.read_text().splitlines() == [
        "one",
        f"headrace: 2 lines were lost here: disk: no space left on device on {tmp_path}/logs",
        "four",
    ]


def test_an_incomplete_line_is_removed(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", 10_000, 1)
    log.write(b"one\n")
    real = io.FileIO.write

    class Short(io.FileIO):
        def write(self, data: object) -> int:
            return real(self, bytes(data)[:2])  # type: ignore[call-overload]

    with mock.patch("builtins.open", lambda path, mode, **_: Short(path, mode.replace("b", ""))):
        log.write(b"two\n")
    log.write(b"three\n")
    lines = log.path.read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("one", "three", 3)


def test_files_and_folders_are_for_their_owner(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "x.log", 100, 1)
    for _ in range(20):
        log.write(b"0123456789\n")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()}
    assert modes == {"x.log": 0o600, "x.log.1": 0o600}
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_a_failed_check_is_reported_with_its_reason() -> None:
    page = b'{"checks": {"bus": true, "capture": false, "routing": false}, "reasons": {"capture": "disk: full"}}'
    assert failed_checks(page) == ("routing", "disk: full")
    assert failed_checks(b'{"checks": {"bus": false}}') == ("bus",)
    assert failed_checks(b"nonsense") == ()
