"""Report of the agreement between the judge and people: `python -m headrace_judge.agreement FILE`.

FILE has one JSON object per line, `{"human": 4, "judge": 5}` with scores of 1 to 5, and optionally the `"criterion"` of
the scores. `"judge": null` is an abstention, which is counted separately. For each criterion the program prints Cohen's
kappa with quadratic weights (Cohen 1968, Psychological Bulletin 70:213) and the confusion table. As a rule of thumb, a
judge below 0.6 needs a better rubric or a better model before its rewards are used for training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_judge.rubric import SCALE_MAX, SCALE_MIN
from headrace_schemas.values.text import read_user_text

SCORES = range(SCALE_MIN, SCALE_MAX + 1)
Score = Annotated[int, Field(ge=SCALE_MIN, le=SCALE_MAX)]
Table = Sequence[Sequence[int]]
"""Counts, with a row for each score of people and a column for each score of the judge."""


class RatedRun(BaseModel):
    """Scores of people and of the judge for one run and one criterion."""

    model_config = ConfigDict(extra="ignore", strict=True)

    human: Score
    judge: Score | None
    criterion: str = "all"


def confusion(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the confusion matrix of score pairs: rows are the scores of people, columns those of the judge."""
    table = [[0] * len(SCORES) for _ in SCORES]
    for human, judge in pairs:
        table[human - SCALE_MIN][judge - SCALE_MIN] += 1
    return table


def quadratic_kappa(table: Table) -> float | None:
    """Return Cohen's kappa with quadratic weights: 1 is perfect agreement, 0 is agreement by chance.

    Kappa is one minus the observed disagreement divided by the expected disagreement of independent raters with the
    same margins. A disagreement is weighted by its squared distance. The result is None if all scores are equal, or if
    there are no scores.
    """
    size = len(table)
    rows = [sum(row) for row in table]
    columns = [sum(column) for column in zip(*table, strict=True)]
    total = sum(rows)
    cells = [(i, j) for i in range(size) for j in range(size)]
    observed = sum((i - j) ** 2 * table[i][j] for i, j in cells)
    expected = sum((i - j) ** 2 * rows[i] * columns[j] for i, j in cells)
    return None if expected == 0 else 1 - total * observed / expected


def report(lines: Sequence[RatedRun]) -> str:
    """Return the text of the report: one section for each criterion, in the order of their first lines."""
    sections = []
    for criterion in dict.fromkeys(line.criterion for line in lines):
        rated = [line for line in lines if line.criterion == criterion]
        table = confusion((line.human, line.judge) for line in rated if line.judge is not None)
        sections.append(_section(criterion, table, sum(line.judge is None for line in rated)))
    return "\n\n".join(sections)


def _section(criterion: str, table: Table, abstained: int) -> str:
    total = sum(map(sum, table))
    kappa = quadratic_kappa(table)
    kappa_text = "undefined (no variation)" if kappa is None else f"{kappa:.3f}"
    same = sum(table[i][i] for i in range(len(table)))
    head = f"{criterion}: kappa {kappa_text}, {total} scored, {same} equal, {abstained} abstained"
    width = max(5, len(str(total)) + 1)
    lines = ["human \\ judge" + "".join(f"{score:>{width}}" for score in SCORES)]
    lines += [f"{score:>13}" + "".join(f"{n:>{width}}" for n in row) for score, row in zip(SCORES, table, strict=True)]
    return "\n".join([head, *lines])


def read(path: Path) -> list[RatedRun]:
    """Parse the file of rated runs. Raises `ValueError` with the number of an invalid line."""
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
            field = ".".join(map(str, first["loc"])) or "the line"
            raise ValueError(f"{path}:{number}: {field}: {first['msg']}") from None
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, and return the exit status: 0, or 2 if the file is invalid."""
    parser = argparse.ArgumentParser(prog="headrace_judge.agreement", description="Agreement of the judge with people.")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines with human and judge scores of 1 to 5")
    try:
        lines = read(parser.parse_args(arguments).file)
        if not lines:
            raise ValueError("the file has no scores")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(report(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
