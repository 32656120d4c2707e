"""What a replay is asked to do: which records, what to change, into which lineage."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.errors import UsageError
from headrace.topics import Range
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_schemas.replay import topic_prefix

Source = Literal["experiences", "trajectories"]
Cut = Literal["auto", "recorded", "rules"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Request:
    """A replay. `overrides` hold the settings of the programs that take part, as they are for the live services."""

    lineage: str
    wanted: Range
    overrides: Overrides
    bus: str
    versions: frozenset[str] = frozenset()
    """Only what one of these took part in; empty: all."""
    judge: bool = False
    cut: Cut = "auto"
    of: str = "main"
    """The lineage whose experiences are trained again."""

    @property
    def rescored(self) -> bool:
        """Whether rewards are made anew, from trajectories, or taken over, with experiences."""
        return self.wanted.topic == "trajectories"

    @property
    def whole(self) -> bool:
        """Everything that the topic holds is wanted."""
        wanted = self.wanted
        bounds = (wanted.from_offset, wanted.to_offset, wanted.since, wanted.until)
        return not (wanted.partitions or wanted.keys or self.versions) and all(bound is None for bound in bounds)

    @property
    def prefix(self) -> str:
        return topic_prefix(self.lineage)

    @property
    def topic(self) -> str:
        """The copy that the trainer reads."""
        return f"{self.prefix}experiences"

    @property
    def model(self) -> str:
        """The model that is trained."""
        return str(self.overrides.get("trainer.model") or "headrace")

    def environ(self, **trainer: object) -> Mapping[str, str]:
        """What the programs find in their environment; `trainer` adds settings of that section."""
        mine = Overrides(None, {f"trainer.{name}": value for name, value in trainer.items()}, self.overrides.environ)
        return mine.environ


def make(
    lineage: str,
    wanted: Range,
    overrides: Overrides,
    bus: str,
    *,
    of: str | None = None,
    versions: frozenset[str] = frozenset(),
    judge: bool = False,
    cut: Cut = "auto",
) -> Request:
    """Check what can be checked without looking. Raises `UsageError` with the remedy."""
    live = str(overrides.get("trainer.lineage") or "main")
    if not _NAME.fullmatch(lineage):
        raise UsageError(f"lineage {lineage!r}: use letters, digits, dots, underscores and hyphens, at most 100")
    if lineage in (live, of):
        raise UsageError(f"lineage {lineage!r} is the one that is trained live; name a new one for the replay")
    if not overrides.get("trainer.base"):
        raise UsageError(
            "trainer.base is not set: name the settings file that the trainer runs with (--config FILE), "
            "or the folder to start from (--set trainer.base=FOLDER)"
        )
    if judge and not overrides.get("judge.endpoint.base_url"):
        raise UsageError("--judge: judge.endpoint.base_url is not set; set it in the settings file or with --set")
    overrides.default("scorer.function_workers", max(2, min(8, os.cpu_count() or 1)))  # nobody waits for one answer
    overrides.set("data_dir", data_dir_of(None, overrides))
    overrides.set("bus.address", bus)
    return Request(lineage, wanted, overrides, bus, versions, judge, cut, of or live)
