"""Every item of the seed documents, played by a program.

`docs/parity.md` as data: an item for each row.
"""

from __future__ import annotations

import argparse
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.parity.programs import article_training, training_tool, tuner
from tests.parity.stage import OWN, PROGRAMS, Stage
from tests.system.program import Line, Program, Run, no_problems

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
COUNTS = {"S0": 56, "S1": 37, "S2": 19, "S3": 24, "S4": 22}
"""Items of each document."""
NOT_MAX = 6
ANNOUNCED = (article_training, training_tool, tuner)
"""Files whose import announces all programs."""
_ROW = re.compile(r"^\| (S\d-\d\d) \| (.+) \| (.+) \| `([\w.]+)` \| (\w+) \| (same|other|not) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Item:
    """A row: the document's item, its counterpart and its place here, the program that shows it, and its equality."""

    id: str
    request: str
    counterpart: str
    where: str
    program: str
    verdict: str


def items(text: str | None = None) -> list[Item]:
    return [Item(*cells) for cells in _ROW.findall(PAGE.read_text(encoding="utf-8") if text is None else text)]


def expected_ids() -> Iterator[str]:
    for seed, count in COUNTS.items():
        yield from (f"{seed}-{number:02}" for number in range(1, count + 1))


def problems(listed: list[Item], programs: set[str]) -> list[str]:
    """Return the errors of the page."""
    ids = [item.id for item in listed]
    expected = list(expected_ids())
    sentences = [f"{item_id} is missing" for item_id in expected if item_id not in ids]
    sentences += [
        f"{item_id} is listed twice, or is none"
        for item_id in sorted(set(ids))
        if ids.count(item_id) > 1 or item_id not in expected
    ]
    sentences += [f"{item.id}: there is no program {item.program}" for item in listed if item.program not in programs]
    sentences += [f"{item.id}: nothing is at {item.where}" for item in listed if not exists(item.where)]
    refused = sum(item.verdict == "not" for item in listed)
    return sentences + ([f"{refused} items are `not`; at most {NOT_MAX}"] if refused > NOT_MAX else [])


def exists(name: str) -> bool:
    """Whether a dotted name leads to something: through packages, then through attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            at = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            at = getattr(at, part, None)  # type: ignore[assignment]
        return at is not None
    return False


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
