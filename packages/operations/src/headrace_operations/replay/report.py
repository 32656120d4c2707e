"""The result of a replay or of its plan, as a table or as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from headrace_schemas.replay import DryRunLine, JudgedLine, ScoredLine


@dataclass(slots=True)
class Report:
    """Filled in while the replay goes on. Counts that nobody made are empty."""

    lineage: str
    of: str
    source: str
    topic: str | None = None
    """Where the experiences were copied to; None for a plan."""
    read: int = 0
    """Records in the range."""
    selected: int = 0
    """Those of them that are replayed."""
    unreadable: int = 0
    other_models: int = 0
    """Experiences of models that are not trained."""
    versions: Counter[str] = field(default_factory=Counter)
    """Version to the selected records that it took part in; counted where they were looked into."""
    kinds: Counter[str] = field(default_factory=Counter)
    """`rewarded`, or why there is no reward, to how many of the selected experiences."""
    judged: JudgedLine | None = None
    scored: ScoredLine | None = None
    cut: Literal["recorded", "rules"] = "rules"
    cut_because: str = ""
    experiences: int = 0
    """Given to training."""
    training: DryRunLine | None = None
    """What became of them, or would."""
    batches_of_original: int | None = None
    batches_equal: int | None = None
    """How many of the original lineage's batches came out the same, from the first one on without a gap."""
    version: str | None = None
    """The last version that was made."""

    def compare(self, original: list[str]) -> None:
        """Against the digests of the original lineage's batches, in order."""
        made = [batch.digest for batch in self.training.batches] if self.training else []
        pairs = zip(original, made, strict=False)
        self.batches_of_original = len(original)
        self.batches_equal = next(
            (n for n, (one, other) in enumerate(pairs) if one != other), min(map(len, (original, made)))
        )

    @property
    def same(self) -> bool:
        """Whether the batches are the original's, all of them and no others."""
        made = len(self.training.batches) if self.training else 0
        return self.batches_equal == self.batches_of_original == made
