"""Training jobs from files that are killed again and again and must end with the same bytes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.jobs.killing import (
    Workplace,
    case_of,
    differences,
    killed,
    manifests,
    moments,
    set_aside,
    to_the_end,
    written,
)
from tests.support import tiny_model
from tests.system.line import equals, no_problems
from tests.system.program import Program, Run


def play(run: Run) -> None:
    options = run.options
    folder = options.keep or run.folder
    began_s = time.monotonic()
    with run.progress(3, "parts") as progress:
        case = case_of(options.rows, run.seed, options.algorithm)
        base, rows = tiny_model.build(folder / "base", layers=1), written(case, folder / "rows.jsonl")
        disturbed = Workplace(folder / "work", base, rows)
        progress.update(0, doing="undisturbed")
        journal = to_the_end(case, disturbed)
        calm = set_aside(disturbed, folder / "quiet")
        undisturbed_s = time.monotonic() - began_s
        versions = len(manifests(calm))
        progress.update(1, doing=f"killed {options.kills} times")
        kills = killed(case, disturbed, moments(run.draw, options.kills, versions), run.draw)
        progress.update(2, doing="comparing")
        run.add(
            equals("kills", sum(kill["killed"] for kill in kills), options.kills),
            equals("rows trained", journal.trained, options.rows),
            no_problems("differences from the undisturbed run", differences(calm, disturbed)),
        )
    run.figures |= {
        "algorithm": case.kind,
        "rows": options.rows,
        "kills": kills,
        "versions_and_trained": [versions, journal.trained],
        "version": journal.version,
        "undisturbed_s": round(undisturbed_s, 1),
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2000, help="rows of the file (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="number of kills (default: %(default)s)")
    parser.add_argument("--algorithm", default="sft", help="algorithm of the job (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="a new folder that stays after the run")


PROGRAM = Program("Kill training jobs and compare the bytes of their versions.", play, _add_arguments)
