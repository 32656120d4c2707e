"""The dedupe window: the revisions, the sampling versions and the contributions of every recent experience.

The window is saved with the weights, so both always describe the same prefix of the stream. It is bounded by count and
age, but an entry that changed the weights stays for as long as the experience is fresh enough to be trained: once it
has left, the staleness bound alone keeps the experience from changing the weights again. Other entries leave by count
and age; a record that is delivered once more after that is judged as if it were new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Annotated

from pydantic import Field

from headrace_runtime.clock import epoch_ms
from headrace_schemas.values.base import Finite, Model, TokenIds, Version
from headrace_trainer.experiences.history import History

AGE_MAX = timedelta(days=30)
"""How long experiences are remembered: as long as their topic retains them."""

REVISIONS_MAX = 64
"""Number of revisions of an experience that are remembered one by one; lower ones count as seen."""


class ContributionDetail(Model):
    """Description of a contribution to an answer, or to a branch that was trained with an advantage for each span."""

    part: str = ""
    """Name of the part within the experience; empty for its branch."""
    turn_id: str = ""
    """With `choice`: the answer that was trained."""
    choice: int = 0
    tokens: TokenIds = ()
    """Tokens that replaced that answer: a withdrawn edit is stored nowhere else."""
    turns: tuple[Finite, ...] = ()
    """The advantage of each span of the branch."""
    terms: Annotated[tuple[Finite, Finite] | None, Field(exclude_if=lambda terms: terms is None)] = None
    """Baseline and scale by which an answer with a graded reply was compared."""


class Contribution(Model):
    """Training of one example of an experience by one step: revision, step and advantage. Corrections add further
    contributions.
    """

    revision: int = -1
    """-1: unknown, because an earlier release trained it."""

    step: int
    advantage: Finite
    token_weight: Finite = 0.0
    """Factor of the gradient of each of its tokens; 0: unknown, because an earlier release trained it. A correction
    uses the same factor."""
    what: ContributionDetail | None = None
    """None: the whole branch, with one advantage."""

    @property
    def part(self) -> str:
        """Name of the trained example within the experience; empty for the whole branch."""
        return self.what.part if self.what else ""

    @property
    def turns(self) -> tuple[float, ...]:
        """The advantage of each span, where they differ."""
        return self.what.turns if self.what else ()


class Entry(Model):
    """Stored facts about an experience that was read: its revisions, sampling versions and contributions to the
    weights.

    `baseline` and `scale` convert its first and all later rewards to advantages, so that a correction can be computed.
    """

    revisions: tuple[int, ...]
    """Revisions seen so far, ascending."""
    versions: tuple[Version, ...]
    """Versions that sampled it; empty when it came without a branch, or when no model sampled it."""
    contributions: tuple[Contribution, ...] = ()
    baseline: Finite = 0.0
    scale: Finite = 1.0
    turn_terms: tuple[Finite, Finite] | None = None
    """Baseline and scale of the rewards of its turns, or None when there were no other rewards to compare them with."""
    partition: int = -1
    offset: int = -1
    """Partition and offset on the bus at which its tokens were last seen."""
    touched_ms: int

    @property
    def trained(self) -> bool:
        return bool(self.contributions)

    def contributions_in_weights(self, history: History, steps: int) -> Sequence[Contribution]:
        """Return the contributions that the present weights contain, without those of abandoned versions.

        Args:
            history: tree of versions, whose head the weights descend from.
            steps: number of steps that the lineage has taken.
        """
        return [contribution for contribution in self.contributions if history.contains_step(contribution.step, steps)]

    def affects_weights(self, history: History, steps: int) -> bool:
        """Return whether the contributions of the experience to the weights after `steps` steps do not cancel out."""
        parts: dict[str, list[Contribution]] = {}
        for contribution in self.contributions_in_weights(history, steps):
            parts.setdefault(contribution.part, []).append(contribution)
        return any(
            math.fsum(contribution.advantage for contribution in contributions)
            or any(map(math.fsum, zip_longest(*(contribution.turns for contribution in contributions), fillvalue=0.0)))
            for contributions in parts.values()
        )

    def revisions_in_weights(self, history: History, steps: int) -> set[int]:
        """Return the revisions of the experience whose contributions the present weights contain.

        Args:
            history: tree of versions, whose head the weights descend from.
            steps: number of steps that the lineage has taken.
        """
        newest = self.revisions[-1]
        return {
            newest if contribution.revision < 0 else contribution.revision
            for contribution in self.contributions_in_weights(history, steps)
        }

    def has_seen(self, revision: int) -> bool:
        return revision in self.revisions or (len(self.revisions) == REVISIONS_MAX and revision < self.revisions[0])

    def terms_of(self, part: str) -> tuple[float, float]:
        """Return the baseline and the scale with which an example of this experience was trained.

        Its advantage was `(reward - baseline) / scale`.

        Args:
            part: name of the example within the experience; empty for the branch itself.
        """
        details = [contribution.what for contribution in self.contributions if part and contribution.part == part]
        terms = [detail.terms for detail in details if detail is not None and detail.terms is not None]
        return terms[-1] if terms else (self.baseline, self.scale)

    def advantage_of(self, reward: float | None, limit: float, part: str = "") -> float:
        """Return the advantage of `reward` with the first training's baseline and scale; 0 if `reward` is None.

        Args:
            reward: reward of the branch, or grade of the reply to an answer.
            limit: bound on advantages.
            part: the example of the experience; empty for its branch.
        """
        baseline, scale = self.terms_of(part)
        return 0.0 if reward is None else max(-limit, min(limit, (reward - baseline) / scale))


class Window:
    """Entries of recently read experiences by their ids, the least recently updated first, for deduplication."""

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self._entries = dict(entries or {})

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, experience_id: str) -> Entry | None:
        return self._entries.get(experience_id)

    def put(self, experience_id: str, entry: Entry) -> None:
        """Add or replace an entry, and make it the most recently touched one."""
        self._entries.pop(experience_id, None)
        self._entries[experience_id] = entry

    def record_arrival(
        self,
        experience_id: str,
        revision: int,
        versions: Iterable[str],
        position: tuple[int, int] | None,
        now: datetime,
    ) -> None:
        """Store that a revision of an experience was read from the bus, so that a repeated record is recognised.

        Args:
            versions: versions that sampled it.
            position: partition and offset of its tokens on the bus; None without tokens.
        """
        touched_ms = epoch_ms(now)
        entry = self._entries.get(experience_id) or Entry(revisions=(), versions=(), touched_ms=touched_ms)
        change: dict[str, object] = {
            "revisions": tuple(sorted({*entry.revisions, revision})[-REVISIONS_MAX:]),
            "touched_ms": touched_ms,
        }
        if position is not None:
            change |= {"versions": tuple(versions), "partition": position[0], "offset": position[1]}
        self.put(experience_id, entry.model_copy(update=change))

    def evict(self, now: datetime, count: int, age: timedelta, needed: Callable[[str, Entry], bool]) -> int:
        """Remove the oldest entries beyond `count` or `age`, except those for which `needed` returns true.

        Returns:
            The number of removed entries.
        """
        horizon = epoch_ms(now - age)
        surplus = len(self._entries) - count
        evicted: list[str] = []
        for experience_id, entry in self._entries.items():
            if surplus <= len(evicted) and entry.touched_ms >= horizon:
                break
            if not needed(experience_id, entry):
                evicted.append(experience_id)
        for experience_id in evicted:
            del self._entries[experience_id]
        return len(evicted)

    def copy(self) -> dict[str, Entry]:
        """Return a copy of the table. Entries are immutable, so the copy is consistent."""
        return dict(self._entries)
