"""Logs stay bounded while they are written, and can be followed across a rotation."""

from __future__ import annotations

import json
import os
from pathlib import Path

from headrace_cli.commands.logs import Tail
from headrace_operations.supervisor.log_file import LogFile
from tests.unit.cli.test_cli import headrace


def write(log: LogFile, *lines: str) -> None:
    reader, writer = os.pipe()
    thread = log.follow(os.fdopen(reader, "rb"))
    with os.fdopen(writer, "w") as pipe:
        pipe.writelines(f"{line}\n" for line in lines)
    thread.join(10)
    assert not thread.is_alive()


def test_rotation_keeps_whole_lines_and_a_bound(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "x.log", bytes_max=100, backups=2)
    lines = [f"line {number:04}" for number in range(50)]  # ten bytes each, with their end
    write(log, *lines)
    files = [tmp_path / "logs" / name for name in ("x.log.2", "x.log.1", "x.log")]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(path.name for path in files)
    assert all(path.stat().st_size <= 100 for path in files)
    assert "".join(path.read_text() for path in files).split("\n")[:-1] == lines[-30:]
    assert list(log.tail) == lines[-20:]


def test_the_next_life_goes_on_in_the_same_file(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", bytes_max=1000, backups=1)
    write(log, "first")
    write(log, "second")
    assert (tmp_path / "x.log").read_text() == "first\nsecond\n"


def test_a_failed_write_does_not_block(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", bytes_max=1000, backups=1)
    (tmp_path / "x.log").mkdir()
    write(log, *(f"line {number} {'x' * 1000}" for number in range(100)))  # more than a pipe holds
    assert log.tail[-1].startswith("line 99")


def test_following_across_a_rotation_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = LogFile(path, bytes_max=60, backups=5)
    write(log, "one", "two")
    tail = Tail(path)
    assert tail.last(1) == ["two"]
    assert list(tail.new()) == []
    with path.open("a") as file:
        file.write("thr")
    assert list(tail.new()) == []
    with path.open("a") as file:
        file.write("ee\n")
    assert list(tail.new()) == ["three"]
    write(log, "four", "x" * 50, "five")
    assert list(tail.new()) == ["four", "x" * 50, "five"]


def test_logs_of_all_services_by_time_and_readable(data_dir: Path) -> None:
    folder = data_dir / "logs"
    folder.mkdir(parents=True)
    entry = {"service": "alpha", "level": "warning", "event": "retrying", "time": "2026-01-01T10:00:02Z", "attempt": 1}
    (folder / "alpha.log").write_text(json.dumps(entry) + "\n")
    earlier = {"service": "beta", "level": "info", "event": "listening", "time": "2026-01-01T10:00:01Z", "port": 5}
    (folder / "beta.log").write_text("Traceback: not JSON\n" + json.dumps(earlier) + "\n")
    status, text = headrace("logs", data_dir=data_dir)
    assert status == 0
    assert text.splitlines() == [
        "beta  Traceback: not JSON",
        "beta  10:00:01 listening port=5",
        "alpha 10:00:02 retrying attempt=1",
    ]
    assert headrace("logs", "alpha", "--raw", data_dir=data_dir) == (0, json.dumps(entry) + "\n")
    assert len(headrace("logs", "-n", "1", data_dir=data_dir)[1].splitlines()) == 2


def test_the_error_for_an_unknown_service_lists_the_known_ones(data_dir: Path) -> None:
    (data_dir / "logs").mkdir(parents=True)
    (data_dir / "logs" / "alpha.log").touch()
    status, text = headrace("logs", "beta", data_dir=data_dir)
    assert (status, "it has the logs of: alpha" in text) == (2, True)
