"""The table of docs/models.md, made of `reports/architectures.json`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.architectures.trial import PACKINGS, Outcome, Trial

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
BEGIN = "<!-- architectures: of reports/architectures.json, `make check NAME=architectures` -->\n"
END = "<!-- end of architectures -->"
_HEAD = f"| architecture | `model_type` | {' | '.join(f'`{packing}`' for packing in PACKINGS)} |\n|---|---|---|---|\n"


def table(trials: Sequence[Trial]) -> str:
    """A line for each."""
    lines = (f"| {trial.name} | `{trial.model_type}` | {' | '.join(_cells(trial))} |" for trial in trials)
    return _HEAD + "".join(f"{line}\n" for line in lines)


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write(trials: Sequence[Trial]) -> None:
    """Put the table where the old one stands."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{begin}{table(trials)}{END}{rest.partition(END)[2]}", encoding="utf-8")


def verdicts(text: str) -> dict[str, str]:
    """Cells of the table by name, without its figures, which differ a little from machine to machine. Where rounding
    alone comes near the bound, so does the verdict.
    """
    lines = [line for line in text.splitlines()[2:] if line.startswith("| ")]
    lines = [re.sub(r"refused: 0\.00\d+ nats", "equal", line) for line in lines]
    return {line.split(" | ")[0].removeprefix("| "): re.sub(r"[0-9.]+(e-?\d+)? nats", "nats", line) for line in lines}


def _cells(trial: Trial) -> list[str]:
    return [_cell(trial.outcomes[packing]) for packing in PACKINGS]


def _cell(outcome: Outcome) -> str:
    if outcome.refused is None:
        return "equal"
    differs = re.search(r"by ([0-9.e-]+ nats)", outcome.refused)
    return f"refused: {differs[1]}" if differs else "refused: attention of its own"
