"""Report of the checks of a job's rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import quantiles

from headrace.errors import UsageError
from headrace_schemas.programs.models import WrittenBranch

REFUSALS_LISTED_MAX = 1000
_PRINTED_MAX = 10


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that cannot be trained, with the reason."""

    file: str
    row: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """A row with its token texts as it would be trained, for printing."""

    file: str
    row: int
    answers: tuple[tuple[WrittenBranch, ...], ...]


@dataclass(slots=True)
class CheckReport:
    """Counts of the rows that were checked. It is filled in while the rows are read."""

    rows: int = 0
    kept: int = 0
    experiences: int = 0
    """Number of branches of one epoch."""
    forks: int = 0
    """Branches beyond the first of an answer; the template renders earlier messages differently in later turns."""
    trained_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of each branch."""
    tokens_max: int = 0
    held_out: int = 0
    """Number of held-out tasks that the rows were compared with."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of rows by column that no format reads."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refused rows by kind."""
    refusals: list[Refusal] = field(default_factory=list)
    """The first refusals, at most `REFUSALS_LISTED_MAX`."""
    shown: list[PreviewRow] = field(default_factory=list)

    def refuse(self, refusal: Refusal) -> None:
        """Count a refused row."""
        self.refused[refusal.kind] += 1
        if len(self.refusals) < REFUSALS_LISTED_MAX:
            self.refusals.append(refusal)

    def keep(self, answers: tuple[tuple[WrittenBranch, ...], ...]) -> None:
        """Count a row that can be trained, with the branches of each of its answers."""
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
        """Return minimum, median, 95th percentile and maximum of the tokens of a branch."""
        if not self.lengths:
            return {}
        lengths = sorted(self.lengths)
        cuts = quantiles(lengths, n=20, method="inclusive") if len(lengths) > 1 else lengths * 19
        return {"least": lengths[0], "median": round(cuts[9]), "95 of 100": round(cuts[18]), "most": lengths[-1]}

    def check(self, skip_bad: int) -> None:
        """Check that at most `skip_bad` rows were refused and at least one row can be trained.

        Raises:
            UsageError: names the first refused rows.
        """
        if self.bad > skip_bad:
            listed = "\n  ".join(map(str, self.refusals[:_PRINTED_MAX]))
            remaining = f"\n  and {self.bad - _PRINTED_MAX} more" if self.bad > _PRINTED_MAX else ""
            allowed = f", but --skip-bad allows {skip_bad}" if skip_bad else ""
            raise UsageError(
                f"{self.bad} of {self.rows} rows cannot be trained{allowed}:\n  {listed}{remaining}\n"
                f"fix the rows, or skip them with --skip-bad {self.bad}"
            )
        if not self.kept:
            raise UsageError(f"none of {self.rows} rows can be trained")
