"""Every item of the seed documents, played by a program."""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

from tests.parity.page import items, problems
from tests.parity.programs import ALL
from tests.parity.stage import OWN, PROGRAMS, Stage
from tests.system.line import Line, no_problems
from tests.system.program import Program, Run

assert len(ALL) > 1


def play_programs(names: list[str], folder: Path) -> dict[str, tuple[str | None, float]]:
    """Return the failure (None: it passed) and the seconds of each program. Programs of the shared stack come first."""
    stage = Stage(folder)
    outcomes: dict[str, tuple[str | None, float]] = {}

    def play_all(chosen: list[str]) -> None:
        for name in chosen:
            began_s, failure = time.monotonic(), None
            try:
                PROGRAMS[name](stage)
            except Exception as error:  # noqa: BLE001 - the items of the program fail, whatever it raises
                traceback.print_exc()
                failure = f"{type(error).__name__}: {error}"[:400]
            outcomes[name] = failure, round(time.monotonic() - began_s, 1)
            print(f"{name:12} {'pass' if failure is None else 'FAIL'} {outcomes[name][1]:7.1f} s", flush=True)

    shared = [name for name in names if name not in OWN]
    if shared:
        with stage.shared():
            play_all(shared)
    play_all([name for name in names if name in OWN])
    return outcomes


def play(run: Run) -> None:
    outcomes = play_programs(run.options.only or list(PROGRAMS), run.folder)
    rows = [item for item in items() if item.program in outcomes]
    for item in rows:
        failure = outcomes[item.program][0]
        verdict = "refused by name" if item.verdict == "not" else "pass"
        name = f"{item.id} {item.program}: {item.request.replace('`', '')}"
        run.add(Line(name, failure or verdict, verdict, failure is None))
    run.add(no_problems("docs/parity.md", problems(items(), set(PROGRAMS))))
    run.figures["items"] = [
        {"id": item.id, "program": item.program, "verdict": item.verdict, "passes": not outcomes[item.program][0]}
        for item in rows
    ]
    run.figures["programs"] = {
        name: {"failure": failure, "seconds": seconds} for name, (failure, seconds) in outcomes.items()
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=sorted(PROGRAMS), help="programs to play (default: all)")


PROGRAM = Program("Play every item of the seed documents.", play, _add_arguments)
