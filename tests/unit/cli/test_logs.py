"""Tests of service logs, of progress output, and of shared command options.

Logs stay bounded while they are written, and can be followed across a rotation. If the disk refuses writes, whole lines
are dropped and counted, and no writer blocks. Options are declared once for several commands.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import typer
from rich.console import Console
from typer.testing import CliRunner

from headrace_cli.commands.logs import Tail
from headrace_cli.commands.shared import expand_option_groups
from headrace_cli.terminal import ProgressDisplay
from headrace_operations.supervisor.process import LogFile
from headrace_operations.supervisor.state import failed_checks
from tests.support.processes import wait_until
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
    assert tail.last_lines(1) == ["two"]
    assert list(tail.new_lines()) == []
    with path.open("a") as file:
        file.write("thr")
    assert list(tail.new_lines()) == []
    with path.open("a") as file:
        file.write("ee\n")
    assert list(tail.new_lines()) == ["three"]
    write(log, "four", "x" * 50, "five")
    assert list(tail.new_lines()) == ["four", "x" * 50, "five"]


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


def test_a_line_has_the_position_and_the_remaining_time() -> None:
    with ProgressDisplay("simulate", 1000, unit="seeds", log=lambda line: None) as progress:
        progress.advance(250, activity="0 failed")
        progress._started_s -= 10
        assert progress.line == "simulate: 250 of 1,000 seeds, 0 failed, 10 s, about 30 s left"


def test_unknown_values_are_left_out_of_the_line() -> None:
    with ProgressDisplay("demo", activity="starting", log=lambda line: None) as progress:
        assert progress.line == "demo: starting, 0 s"
        progress.update(3)
        assert progress.line == "demo: 3, starting, 0 s"
    with ProgressDisplay("work", 60, unit="s at most", estimate=False, log=lambda line: None) as progress:
        progress.update(20)
        assert progress.line == "work: 20 of 60 s at most, 0 s"


def test_a_log_has_a_line_at_each_interval_also_without_progress() -> None:
    lines: list[str] = []
    with ProgressDisplay("attack", 3, unit="attacks", log=lines.append, interval_s=0.01) as progress:
        progress.update(activity="silent_connections")
        wait_until(lambda: len(lines) > 2, 20, "three lines")
        progress.print_line("one of them is broken")
    assert lines.count("one of them is broken") == 1
    assert {line for line in lines if line.startswith("attack")} <= {
        f"attack: 0 of 3 attacks, {activity}0 s" for activity in ("", "silent_connections, ")
    }
    ended = len(lines)
    assert progress._log_thread is not None
    assert not progress._log_thread.is_alive(), "no line comes after the end"
    assert len(lines) == ended


def test_a_terminal_has_a_bar_and_lines_above_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with ProgressDisplay("mutants", 4, unit="mutants", console=console) as progress:
        progress.advance(activity="1 live")
        progress.print_line("survived: [bold]a[1][/]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "survived: [bold]a[1][/]" in text
    assert re.search(r"mutants .*1/4 mutants .*1 live", text)
    assert progress._log_thread is None


@dataclass(frozen=True)
class Where:
    place: Annotated[str, typer.Option("--at", help="Where.")] = "here"


@dataclass(frozen=True)
class Exactly(Where):
    times: Annotated[list[int] | None, typer.Option(min=1)] = None


def show(name: Annotated[str, typer.Argument()], *, where: Exactly, loud: bool = False) -> None:
    """Print the arguments."""
    typer.echo(f"{name} {where} {loud}")


def plain(name: str) -> None:
    typer.echo(name)


def test_a_group_is_given_by_its_options() -> None:
    app = typer.Typer()
    app.command()(expand_option_groups(show))
    run = CliRunner().invoke
    assert run(app, ["x"]).output == "x Exactly(place='here', times=None) False\n"
    result = run(app, ["x", "--at", "there", "--times", "1", "--times", "2", "--loud"])
    assert result.output == "x Exactly(place='there', times=[1, 2]) True\n"
    assert run(app, ["x", "--times", "0"]).exit_code == 2
    assert "Where." in run(app, ["--help"]).output


def test_a_function_without_a_group_stays_as_it_is() -> None:
    assert expand_option_groups(plain) is plain
