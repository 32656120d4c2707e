"""Running rollouts whose registries, replicas, gateways and trainers die, on each database."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import structlog

from tests.rollouts.mortal import FAULTS
from tests.rollouts.rig import WAIT_S, running
from tests.rollouts.story import Cell, Played, Story
from tests.support import tiny_model
from tests.support.servers import PostgresNode, missing_postgres
from tests.system.program import Line, Program, Run, caught, no_problems

VICTIMS = ("registry", "registries", "replica", "gateway", "trainer")
INJECTED = "faults"
_FAULT_WAIT_S = 20.0
_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that run on the same processes."""

    database: str
    cells: tuple[Cell, ...]
    fault: str = ""


def groups() -> list[Group]:
    """Return all groups of cells: each victim on each database, and each planted fault."""
    all_groups = []
    for database in ("sqlite", "postgres"):
        victims = (*(("nobody",) if database == "sqlite" else ()), *VICTIMS)
        cells = [Cell(database, victim, end) for victim in victims for end in ("better", "worse")]
        played = [cell for cell in cells if (cell.victim, cell.end) != ("trainer", "better")]
        all_groups.append(Group(database, tuple(played)))
    for fault in FAULTS:
        end = "worse" if "routing" in fault else "better"
        all_groups.append(Group("sqlite", (Cell("sqlite", "registry", end),), fault))
    return all_groups


def select_cells(group: Group, only: list[str]) -> Group:
    """Return the cells whose names begin with one of `only`; the name of a planted fault begins with `planted`."""
    names = {cell: f"planted/{group.fault}" if group.fault else cell.name for cell in group.cells}
    return Group(
        group.database,
        tuple(cell for cell in group.cells if not only or any(names[cell].startswith(part) for part in only)),
        group.fault,
    )


@contextlib.contextmanager
def database_of(group: Group, folder: Path) -> Iterator[str]:
    """Yield the setting `database.url` for the group's database."""
    if group.database == "sqlite":
        yield "sqlite"
        return
    node = PostgresNode(folder, durable=False)
    node.start()
    try:
        yield node.url()
    finally:
        node.stop()


async def play_group(group: Group, folder: Path, url: str, draw: random.Random, base: Path | None) -> list[Played]:
    """Run the cells of a group one after the other."""
    outcomes = []
    async with running(folder, url, group.fault) as rig:
        for cell in group.cells:
            story = Story(rig, cell, draw, base, _FAULT_WAIT_S if group.fault else WAIT_S)
            outcomes.append(await story.play())
            print(f"  {cell.name}: {outcomes[-1].seconds} s, {outcomes[-1].steps}", flush=True)
    return outcomes


def lines_of(group: Group, outcomes: list[Played]) -> Iterator[Line]:
    """Yield a line for each cell. The line of a planted fault holds when the checks detected the fault."""
    for cell, outcome in zip(group.cells, outcomes, strict=True):
        details = {**asdict(outcome), "problems": outcome.problems[:_SHOWN_MAX]}
        if group.fault:
            noticed = any(FAULTS[group.fault][1] in problem for problem in outcome.problems)
            yield caught(group.fault, by_the_suite=noticed, details=details)
        else:
            line = no_problems(cell.name, outcome.problems, _SHOWN_MAX)
            yield replace(line, details={**details, **line.details})


def play(run: Run) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    only = run.options.only
    selected = [group for group in (select_cells(group, only) for group in groups()) if group.cells]
    with run.progress(sum(len(group.cells) for group in selected) + 1, "cells") as progress:
        if not only or INJECTED in only:
            from tests.rollouts import faults  # imports torch

            progress.update(0, activity="faults between the store and a replica")
            run.add(*asyncio.run(faults.lines(run.folder / "faults", run.options.faults, run.draw)))
        base = None
        if any(cell.victim == "trainer" for group in selected for cell in group.cells):
            base = tiny_model.build(run.folder / "base", layers=1)
        for number, group in enumerate(selected):
            progress.update(number + 1, activity=group.fault or group.database)
            if group.database == "postgres" and (reason := missing_postgres()):
                run.skip(f"{len(group.cells)} cells on {group.database}", reason)
                continue
            group_folder = run.folder / str(number)
            with database_of(group, group_folder / "postgres") as url:
                outcomes = asyncio.run(play_group(group, group_folder / "processes", url, run.draw, base))
            run.add_all(lines_of(group, outcomes))
    run.figures["kills"] = sum(
        len(cast("list[object]", line.details.get(kind, ()))) for line in run.lines for kind in ("kills", "deaths")
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names: sqlite/gateway planted faults")
    parser.add_argument("--faults", type=int, default=1000, help="faults of the store (default: %(default)s)")


PROGRAM = Program("Kill the parts of live rollouts and compare with the undisturbed ones.", play, _add_arguments)
