"""Progress of long work, in a log and on a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from headrace_cli.progress import ProgressDisplay
from tests.support.processes import wait_until


def test_a_line_has_the_position_and_the_remaining_time() -> None:
    with ProgressDisplay("simulate", 1000, unit="seeds", log=lambda line: None) as progress:
        progress.advance(250, doing="0 failed")
        progress._started_s -= 10
        assert progress.line == "simulate: 250 of 1,000 seeds, 0 failed, 10 s, about 30 s left"


def test_unknown_values_are_left_out_of_the_line() -> None:
    with ProgressDisplay("demo", doing="starting", log=lambda line: None) as progress:
        assert progress.line == "demo: starting, 0 s"
        progress.update(3)
        assert progress.line == "demo: 3, starting, 0 s"
    with ProgressDisplay("work", 60, unit="s at most", estimate=False, log=lambda line: None) as progress:
        progress.update(20)
        assert progress.line == "work: 20 of 60 s at most, 0 s"


def test_a_log_has_a_line_at_each_interval_also_without_progress() -> None:
    lines: list[str] = []
    with ProgressDisplay("attack", 3, unit="attacks", log=lines.append, interval_s=0.01) as progress:
        progress.update(doing="silent_connections")
        wait_until(lambda: len(lines) > 2, 20, "three lines")
        progress.print_line("one of them is broken")
    assert lines.count("one of them is broken") == 1
    assert {line for line in lines if line.startswith("attack")} <= {
        f"attack: 0 of 3 attacks, {doing}0 s" for doing in ("", "silent_connections, ")
    }
    ended = len(lines)
    assert progress._log_thread is not None
    assert not progress._log_thread.is_alive(), "no line comes after the end"
    assert len(lines) == ended


def test_a_terminal_has_a_bar_and_lines_above_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with ProgressDisplay("mutants", 4, unit="mutants", console=console) as progress:
        progress.advance(doing="1 live")
        progress.print_line("survived: [bold]a[1][/]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "survived: [bold]a[1][/]" in text
    assert re.search(r"mutants .*1/4 mutants .*1 live", text)
    assert progress._log_thread is None
