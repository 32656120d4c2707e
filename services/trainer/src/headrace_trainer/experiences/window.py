"""The dedupe window: what is known about every experience seen lately, and what it has done to the weights (P4).

The window is saved with the weights, so both always describe the same prefix of the stream. It is bounded by count and
age, but an entry that changed the weights stays for as long as the experience is fresh enough to be trained: once it
has left, the staleness bound alone keeps the experience from changing the weights again. Other entries leave by count
and age; a record that is delivered once more after that is judged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from headrace_runtime.clock import epoch_ms
from headrace_schemas.arrays import TokenIds
from headrace_schemas.base import Finite, Model, Version
from headrace_trainer.experiences.history import History

REVISIONS_MAX = 64
"""Revisions of one experience that are remembered one by one; lower ones than those count as seen."""


class Contributed(Model):
    """What a contribution was of, where it was not a whole branch with one advantage."""

    part: str = ""
    turn_id: str = ""
    choice: int = 0
    """The answer that the example is about."""
    tokens: TokenIds = ()
    """What was written in place of that answer: a withdrawn edit is nowhere else."""
    turns: tuple[Finite, ...] = ()


class Contribution(Model):
    """In step `step` an experience was trained with this advantage. A correction adds another contribution."""

    revision: int = -1
    """-1: not known, because an earlier release trained it."""

    step: int
    advantage: Finite
    token_weight: Finite = 0.0
    """What the gradient of each of its tokens was multiplied with; 0: not known, because an earlier release trained
    it. A correction is multiplied with the same."""
    what: Contributed | None = None
    """None: the branch, with one advantage for all of it."""

    @property
    def part(self) -> str:
        """Which example of the experience it was; empty: its branch."""
        return self.what.part if self.what else ""

    @property
    def turns(self) -> tuple[float, ...]:
        """The advantage of each span, where they differ."""
        return self.what.turns if self.what else ()


class Entry(Model):
    """One experience. `baseline` and `scale` turned its first trained reward into an advantage, and turn later ones."""

    revisions: tuple[int, ...]
    """Seen so far, ascending."""
    versions: tuple[Version, ...]
    """What sampled it; empty when it came without a branch, or when nobody sampled it."""
    contributions: tuple[Contribution, ...] = ()
    baseline: Finite = 0.0
    scale: Finite = 1.0
    turn_terms: tuple[Finite, Finite] | None = None
    """Baseline and scale of the rewards of its turns; None: there was nothing to compare them with."""
    partition: int = -1
    offset: int = -1
    """Where on the bus its tokens were last seen."""
    touched_ms: int

    @property
    def trained(self) -> bool:
        return bool(self.contributions)

    def held(self, history: History, steps: int) -> Sequence[Contribution]:
        """What the weights after so many steps hold of it: a version that was abandoned took its steps along."""
        return [one for one in self.contributions if history.holds_step(one.step, steps)]

    def held_revisions(self, history: History, steps: int) -> set[int]:
        """The revisions of what is held."""
        newest = self.revisions[-1]
        return {newest if one.revision < 0 else one.revision for one in self.held(history, steps)}

    def seen(self, revision: int) -> bool:
        return revision in self.revisions or (len(self.revisions) == REVISIONS_MAX and revision < self.revisions[0])

    def advantage_of(self, reward: float | None, limit: float) -> float:
        """What `reward` is worth on the terms of the first training; 0 when there is none (any more)."""
        return 0.0 if reward is None else max(-limit, min(limit, (reward - self.baseline) / self.scale))


class Window:
    """Entries by experience id, the one touched longest ago first."""

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self._entries = dict(entries or {})

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, experience_id: str) -> Entry | None:
        return self._entries.get(experience_id)

    def put(self, experience_id: str, entry: Entry) -> None:
        """Add or replace; the entry is then the one touched last."""
        self._entries.pop(experience_id, None)
        self._entries[experience_id] = entry

    def see(
        self,
        experience_id: str,
        revision: int,
        versions: Iterable[str],
        place: tuple[int, int] | None,
        now: datetime,
    ) -> None:
        """Note that a revision has arrived. `place` is the partition and offset of its tokens, None without any."""
        touched_ms = epoch_ms(now)
        entry = self._entries.get(experience_id) or Entry(revisions=(), versions=(), touched_ms=touched_ms)
        change: dict[str, object] = {
            "revisions": tuple(sorted({*entry.revisions, revision})[-REVISIONS_MAX:]),
            "touched_ms": touched_ms,
        }
        if place is not None:
            change |= {"versions": tuple(versions), "partition": place[0], "offset": place[1]}
        self.put(experience_id, entry.model_copy(update=change))

    def evict(self, now: datetime, count: int, age: timedelta, needed: Callable[[str, Entry], bool]) -> int:
        """Forget the oldest entries beyond `count` or `age`, except those that are `needed`. Returns how many went."""
        horizon = epoch_ms(now - age)
        surplus = len(self._entries) - count
        gone: list[str] = []
        for experience_id, entry in self._entries.items():
            if surplus <= len(gone) and entry.touched_ms >= horizon:
                break
            if not needed(experience_id, entry):
                gone.append(experience_id)
        for experience_id in gone:
            del self._entries[experience_id]
        return len(gone)

    def copy(self) -> dict[str, Entry]:
        """Entries are immutable, so this is a consistent picture."""
        return dict(self._entries)
