"""The result of a replay or of its plan, as a table or as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from headrace_schemas.programs.replay import DryRunLine, JudgedLine, ScoredLine


@dataclass(slots=True)
class Report:
    """Counts of a replay, filled in while it runs. Counts of parts that did not run are empty."""

    lineage: str
    of: str
    source: str
    topic: str | None = None
    """Topic to which the experiences were copied; None for a plan."""
    read: int = 0
    """Number of records in the range."""
    selected: int = 0
    """Number of records that are replayed."""
    unreadable: int = 0
    other_models: int = 0
    """Number of experiences of other models than the trained one."""
    versions: Counter[str] = field(default_factory=Counter)
    """Version to the number of selected records that it took part in; empty if the records were not parsed."""
    kinds: Counter[str] = field(default_factory=Counter)
    """`rewarded`, or the reason why there is no reward, to the number of selected experiences."""
    judged: JudgedLine | None = None
    scored: ScoredLine | None = None
    cut: Literal["recorded", "rules"] = "rules"
    cut_because: str = ""
    experiences: int = 0
    """Number of experiences that training got."""
    training: DryRunLine | None = None
    """Result of the training, or of the dry run."""
    batches_of_original: int | None = None
    batches_equal: int | None = None
    """Number of the original lineage's batches that came out equal, counted from the first one without a gap."""
    version: str | None = None
    """Last version of the replay."""

    def compare(self, original: list[str]) -> None:
        """Compare the batches with the digests of the original lineage's batches, in order."""
        digests = [batch.digest for batch in self.training.batches] if self.training else []
        pairs = zip(original, digests, strict=False)
        self.batches_of_original = len(original)
        self.batches_equal = next(
            (n for n, (original_digest, digest) in enumerate(pairs) if original_digest != digest),
            min(map(len, (original, digests))),
        )

    @property
    def same(self) -> bool:
        """Whether the batches are exactly those of the original lineage."""
        batch_count = len(self.training.batches) if self.training else 0
        return self.batches_equal == self.batches_of_original == batch_count
