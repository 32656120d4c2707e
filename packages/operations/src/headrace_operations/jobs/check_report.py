"""What the checks found in the rows of a job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import quantiles

from headrace.errors import UsageError
from headrace_schemas.written import WrittenBranch

REFUSALS_KEPT = 1000
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is not trained."""

    file: str
    row: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Shown:
    """A row as it would be trained, for people."""

    file: str
    row: int
    answers: tuple[tuple[WrittenBranch, ...], ...]


@dataclass(slots=True)
class CheckReport:
    """Filled in while the rows are read."""

    rows: int = 0
    kept: int = 0
    experiences: int = 0
    """Branches of one epoch."""
    forks: int = 0
    """Branches beyond the first of an answer: the template shows earlier messages otherwise later on."""
    trained_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each branch."""
    tokens_max: int = 0
    held_out: int = 0
    """Held-out tasks that were looked for."""
    unread: Counter[str] = field(default_factory=Counter)
    """Columns that nobody read, with how many rows have them."""
    refused: Counter[str] = field(default_factory=Counter)
    """By kind."""
    refusals: list[Refusal] = field(default_factory=list)
    """The first of them."""
    shown: list[Shown] = field(default_factory=list)

    def refuse(self, refusal: Refusal) -> None:
        self.refused[refusal.kind] += 1
        if len(self.refusals) < REFUSALS_KEPT:
            self.refusals.append(refusal)

    def keep(self, answers: tuple[tuple[WrittenBranch, ...], ...]) -> None:
        self.kept += 1
        for branches in answers:
            self.experiences += len(branches)
            self.forks += len(branches) - 1
            for branch in branches:
                self.lengths.append(len(branch.token_ids))
                self.trained_tokens += sum(span.length for span in branch.spans)

    @property
    def bad(self) -> int:
        return self.refused.total()

    def spread(self) -> dict[str, int]:
        """Tokens of a branch: the least, the median, what 95 of 100 stay within, the most."""
        if not self.lengths:
            return {}
        ordered = sorted(self.lengths)
        cuts = quantiles(ordered, n=20, method="inclusive") if len(ordered) > 1 else ordered * 19
        return {"least": ordered[0], "median": round(cuts[9]), "95 of 100": round(cuts[18]), "most": ordered[-1]}

    def check(self, skip_bad: int) -> None:
        """Raises `UsageError` with the first rows that are bad when they are more than may be left out."""
        if self.bad > skip_bad:
            listed = "\n  ".join(map(str, self.refusals[:_SHOWN]))
            more = f"\n  and {self.bad - _SHOWN} more" if self.bad > _SHOWN else ""
            allowed = f", and --skip-bad is {skip_bad}" if skip_bad else ""
            raise UsageError(
                f"{self.bad} of {self.rows} rows cannot be trained{allowed}:\n  {listed}{more}\n"
                f"mend them, or leave them out with --skip-bad {self.bad}"
            )
        if not self.kept:
            raise UsageError(f"none of {self.rows} rows can be trained")
