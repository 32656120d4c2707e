"""Request of a replay, and the report of its plan or result, as a table or as JSON."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import UsageError
from headrace.topics import Range
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_schemas.programs import DryRunLine, JudgedLine, ScoredLine, topic_prefix

Source = Literal["experiences", "trajectories"]
Cut = Literal["auto", "recorded", "rules"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Request:
    """Parameters of a replay. `overrides` are the settings of the programs that it runs, by default the live
    settings.
    """

    lineage: str
    topic_range: Range
    overrides: Overrides
    bus: str
    versions: frozenset[str] = frozenset()
    """Replay only records in which one of these versions took part; empty for all."""
    judge: bool = False
    cut: Cut = "auto"
    of: str = "main"
    """The original lineage, whose experiences are trained again."""

    @property
    def is_rescored(self) -> bool:
        """Whether rewards are computed again from trajectories, instead of copying experiences with their rewards."""
        return self.topic_range.topic == "trajectories"

    @property
    def is_complete(self) -> bool:
        """Whether the request selects every record of the topic."""
        topic_range = self.topic_range
        bounds = (topic_range.from_offset, topic_range.to_offset, topic_range.since, topic_range.until)
        return not (topic_range.partitions or topic_range.keys or self.versions) and all(
            bound is None for bound in bounds
        )

    @property
    def prefix(self) -> str:
        return topic_prefix(self.lineage)

    @property
    def topic(self) -> str:
        """Topic with the copied experiences, which the trainer reads."""
        return f"{self.prefix}experiences"

    @property
    def model(self) -> str:
        """Name of the model that is trained."""
        return str(self.overrides.get("trainer.model") or "headrace")

    def environ(self, **trainer: object) -> Mapping[str, str]:
        """Return the environment variables of the programs that the replay runs.

        Keyword arguments are added as settings of the section `trainer`.
        """
        overrides = Overrides(
            None, {f"trainer.{name}": value for name, value in trainer.items()}, self.overrides.environ
        )
        return overrides.environ


def make(
    lineage: str,
    topic_range: Range,
    overrides: Overrides,
    bus: str,
    *,
    of: str | None = None,
    versions: frozenset[str] = frozenset(),
    judge: bool = False,
    cut: Cut = "auto",
) -> Request:
    """Build and check the request of a replay, without connecting to the bus.

    Raises:
        UsageError: a value is invalid; the message names the value and a remedy.
    """
    live = str(overrides.get("trainer.lineage") or "main")
    if not _NAME.fullmatch(lineage):
        raise UsageError(
            f"lineage = {lineage!r}: must have 1 to 100 letters, digits, dots, underscores and hyphens, "
            "and begin with a letter or digit"
        )
    if lineage in (live, of):
        raise UsageError(f"lineage = {lineage!r}: is the live lineage; choose another name for the replay")
    if not overrides.get("trainer.base"):
        raise UsageError(
            "trainer.base is not set: name the settings file of the trainer (--config FILE), "
            "or the base (--set trainer.base=FOLDER)"
        )
    if judge and not overrides.get("judge.endpoint.base_url"):
        raise UsageError("--judge: judge.endpoint.base_url is not set; set it in the settings file or with --set")
    overrides.default(
        "scorer.function_workers", max(2, min(8, os.cpu_count() or 1))
    )  # throughput matters, not the time of one answer
    overrides.set("data_dir", data_dir_of(None, overrides))
    overrides.set("bus.address", bus)
    return Request(lineage, topic_range, overrides, bus, versions, judge, cut, of or live)


@dataclass(slots=True)
class Report:
    """Counts of a replay, which grow while it runs. Counts of steps that did not run are empty."""

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
        """Store how many batches equal those of the original lineage, whose digests `original` lists in order."""
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
