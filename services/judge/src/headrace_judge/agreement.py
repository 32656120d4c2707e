"""How well the judge agrees with people: `python -m headrace_judge.agreement FILE`.

FILE holds one JSON object a line, `{"human": 4, "judge": 5}` with scores of 1 to 5, and optionally the `"criterion"`
they are about; `"judge": null` is an abstention, which is counted apart. Printed are, per criterion, Cohen's kappa with
quadratic weights (Cohen 1968, Psychological Bulletin 70:213) and the confusion table. As a rule of thumb a judge below
0.6 wants a better rubric or a better model before anybody trains on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_judge.rubric import SCALE_MAX, SCALE_MIN
from headrace_schemas.user_text import read_user_text

SCORES = range(SCALE_MIN, SCALE_MAX + 1)
Score = Annotated[int, Field(ge=SCALE_MIN, le=SCALE_MAX)]
Table = Sequence[Sequence[int]]
"""Counts: one row per human score, one column per judge's score."""


class RatedRun(BaseModel):
    """One run, scored twice."""

    model_config = ConfigDict(extra="ignore", strict=True)

    human: Score
    judge: Score | None
    criterion: str = "all"


def confusion(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The table of (human, judge) scores."""
    table = [[0] * len(SCORES) for _ in SCORES]
    for human, judge in pairs:
        table[human - SCALE_MIN][judge - SCALE_MIN] += 1
    return table


def quadratic_kappa(table: Table) -> float | None:
    """1 is perfect, 0 what chance gives with these margins. None when all scores are equal, or there are none.

    One minus the disagreement that is seen over the one that independent raters with the same margins would show; a
    disagreement counts with its squared distance.
    """
    size = len(table)
    rows = [sum(row) for row in table]
    columns = [sum(column) for column in zip(*table, strict=True)]
    total = sum(rows)
    cells = [(i, j) for i in range(size) for j in range(size)]
    seen = sum((i - j) ** 2 * table[i][j] for i, j in cells)
    expected = sum((i - j) ** 2 * rows[i] * columns[j] for i, j in cells)
    return None if expected == 0 else 1 - total * seen / expected


def report(lines: Sequence[RatedRun]) -> str:
    """One section per criterion, in the order of appearance."""
    sections = []
    for criterion in dict.fromkeys(line.criterion for line in lines):
        about = [line for line in lines if line.criterion == criterion]
        table = confusion((line.human, line.judge) for line in about if line.judge is not None)
        sections.append(_section(criterion, table, sum(line.judge is None for line in about)))
    return "\n\n".join(sections)


def _section(criterion: str, table: Table, abstained: int) -> str:
    total = sum(map(sum, table))
    kappa = quadratic_kappa(table)
    shown = "undefined (no variation)" if kappa is None else f"{kappa:.3f}"
    same = sum(table[i][i] for i in range(len(table)))
    head = f"{criterion}: kappa {shown}, {total} scored, {same} equal, {abstained} abstained"
    width = max(5, len(str(total)) + 1)
    lines = ["human \\ judge" + "".join(f"{score:>{width}}" for score in SCORES)]
    lines += [f"{score:>13}" + "".join(f"{n:>{width}}" for n in row) for score, row in zip(SCORES, table, strict=True)]
    return "\n".join([head, *lines])


def read(path: Path) -> list[RatedRun]:
    """Raises `ValueError` that names the line."""
    lines = []
    try:
        content = read_user_text(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    for number, text in enumerate(content.split("\n"), 1):
        if not text.strip():
            continue
        try:
            lines.append(RatedRun.model_validate_json(text))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise ValueError(f"{path}:{number}: {where}: {first['msg']}") from None
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 when the file cannot be used."""
    parser = argparse.ArgumentParser(prog="headrace_judge.agreement", description="Agreement of the judge with people.")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines with human and judge scores of 1 to 5")
    try:
        lines = read(parser.parse_args(arguments).file)
        if not lines:
            raise ValueError("the file holds no scores")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(report(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
