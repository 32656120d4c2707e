"""`python -m tests.rollouts`: writes `reports/test-rollouts.json`; status 1 when a line does not hold."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from headrace_cli.progress import ProgressDisplay
from tests.rollouts.mortal import FAULTS
from tests.rollouts.rig import WAIT_S, running
from tests.rollouts.story import Cell, Played, Story
from tests.support import reaper, tiny_model
from tests.support.postgres_node import PostgresNode, missing

REPORT = Path("reports/test-rollouts.json")
VICTIMS = ("registry", "registries", "replica", "gateway", "trainer")
INJECTED = "faults"
_FAULT_WAIT_S = 20.0
_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that share their processes."""

    database: str
    cells: tuple[Cell, ...]
    fault: str = ""


def groups() -> list[Group]:
    """All that there is to play."""
    found = []
    for database in ("sqlite", "postgres"):
        victims = (*(("nobody",) if database == "sqlite" else ()), *VICTIMS)
        cells = [Cell(database, victim, end) for victim in victims for end in ("better", "worse")]
        wanted = [one for one in cells if (one.victim, one.end) != ("trainer", "better")]
        found.append(Group(database, tuple(wanted)))
    for fault in FAULTS:
        end = "worse" if "routing" in fault else "better"
        found.append(Group("sqlite", (Cell("sqlite", "registry", end),), fault))
    return found


def picked(group: Group, only: list[str]) -> Group:
    """The cells whose names begin with one of `only`; a planted fault's name begins with `planted`."""
    names = {one: f"planted/{group.fault}" if group.fault else one.name for one in group.cells}
    return Group(
        group.database,
        tuple(one for one in group.cells if not only or any(names[one].startswith(part) for part in only)),
        group.fault,
    )


@contextlib.contextmanager
def database_of(group: Group, folder: Path) -> Iterator[str]:
    """`database.url`."""
    if group.database == "sqlite":
        yield "sqlite"
        return
    node = PostgresNode(folder, durable=False)
    node.start()
    try:
        yield node.url()
    finally:
        node.stop()


async def play(group: Group, folder: Path, url: str, draw: random.Random, base: Path | None) -> list[Played]:
    """Each cell, one after the other."""
    found = []
    async with running(folder, url, group.fault) as place:
        for cell in group.cells:
            story = Story(place, cell, draw, base, _FAULT_WAIT_S if group.fault else WAIT_S)
            found.append(await story.play())
            print(f"  {cell.name}: {found[-1].seconds} s, {found[-1].steps}, {found[-1].problems[:2]}", flush=True)
    return found


def lines_of(group: Group, played: list[Played]) -> list[dict[str, Any]]:
    """A line for each cell; a planted fault's holds when it was found."""
    found = []
    for cell, one in zip(group.cells, played, strict=True):
        about = {**asdict(one), "problems": one.problems[:_SHOWN_MAX]}
        if group.fault:
            caught = any(FAULTS[group.fault][1] in problem for problem in one.problems)
            found.append({"name": f"found: {group.fault}", "holds": caught, **about})
        else:
            found.append({"name": cell.name, "holds": not one.problems, **about})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names: sqlite/gateway planted faults")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    reaper.start()
    began_s, left_out = time.monotonic(), list[str]()
    lines: list[dict[str, Any]] = []
    wanted = [one for group in groups() if (one := picked(group, given.only)).cells]
    with (
        ProgressDisplay("test-rollouts", sum(len(one.cells) for one in wanted) + 1) as progress,
        tempfile.TemporaryDirectory(prefix="headrace-rollouts-", ignore_cleanup_errors=True) as scratch,
    ):
        progress.say(f"seed {given.seed}")
        folder, draw = Path(scratch), random.Random(given.seed)
        if not given.only or INJECTED in given.only:
            from tests.rollouts import faults  # brings torch along

            progress.at(0, doing="faults between the store and a replica")
            lines += asyncio.run(faults.lines(folder / "faults", given.faults, draw))
        base = None
        if any(cell.victim == "trainer" for group in wanted for cell in group.cells):
            base = tiny_model.build(folder / "base", layers=1)
        for number, group in enumerate(wanted):
            progress.at(number + 1, doing=group.fault or group.database)
            why = missing() if group.database == "postgres" else None
            if why:
                left_out.append(f"{len(group.cells)} cells on {group.database}: {why}")
                continue
            place = folder / str(number)
            with database_of(group, place / "postgres") as url:
                played = asyncio.run(play(group, place / "processes", url, draw, base))
            lines += lines_of(group, played)
    killed = sum(len(line.get("kills", ())) + len(line.get("deaths", ())) for line in lines)
    report = {
        "target": "test-rollouts", "seed": given.seed, "seconds": round(time.monotonic() - began_s, 1),
        "kills": killed, "left_out": left_out, "lines": lines,
    }  # fmt: skip
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in lines:
        print(f"{'holds' if line['holds'] else 'DOES NOT HOLD'}: {line['name']}")
        if not line["holds"]:
            print("".join(f"  {one}\n" for one in line["problems"]), end="")
    for told in left_out:
        print(f"NOT PLAYED: {told}")
    return 0 if all(line["holds"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
