"""Word problems of several steps, in sets that share no question."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["warm_up", "train", "gate", "audit"]
"""What the base model is shown, what the agent's own traffic asks, what decides about versions, and what decides
nothing."""
SPLITS: tuple[Split, ...] = Split.__args__  # type: ignore[attr-defined]

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin", "Leon", "Mia", "Nora",
    "Oscar", "Paula",
)  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "nuts", "pens", "shells", "stamps")
ORDINALS: Mapping[int, tuple[str, ...]] = {2: ("First", "Last"), 3: ("First", "Next", "Last")}
"""How the changes of a problem begin, by their number."""
VERBS: Mapping[str, tuple[str, ...]] = {"+": ("buys", "finds", "picks"), "-": ("loses", "sells", "eats")}
RESULT: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda held, by: held + by,
    "-": lambda held, by: held - by,
    "*": lambda held, by: held * by,
}
HELD_MAX = 199
"""Nobody ever has more. Numbers up to here are one token each."""
_LEAST = 2
"""Of what comes, goes or multiplies."""


@dataclass(frozen=True)
class Change:
    """One sentence of a problem."""

    ordinal: str
    sign: str
    number: int
    sentence: str


@dataclass(frozen=True)
class Problem:
    """A question with one right answer. A change needs a thought and a call: two steps."""

    id: str
    kind: str
    name: str
    things: str
    start: int
    changes: tuple[Change, ...]

    @property
    def question(self) -> str:
        said = " ".join(change.sentence for change in self.changes)
        return f"{self.opening} {said} How many {self.things} are there now?"

    @property
    def opening(self) -> str:
        return f"{self.name} has {self.start} {self.things}."

    @property
    def expected(self) -> int:
        held = self.start
        for change in self.changes:
            held = RESULT[change.sign](held, change.number)
        return held

    @property
    def steps_min(self) -> int:
        return 2 * len(self.changes)

    @property
    def split(self) -> Split:
        """Decided by the question alone, so that no two splits share one."""
        return SPLITS[int(self.id, 16) % len(SPLITS)]


def stream(split: Split, seed: int) -> Iterator[Problem]:
    """Problems of `split` without end, of two and of three changes in turn; none comes twice."""
    rng = random.Random(f"problems {split} {seed}")
    seen: set[str] = set()
    for count in itertools.cycle(ORDINALS):
        while (problem := _problem(rng, count)).split != split or problem.id in seen:
            pass
        seen.add(problem.id)
        yield problem


def _problem(rng: random.Random, count: int) -> Problem:
    name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(12, 60)
    held, changes = start, []
    for ordinal in ORDINALS[count]:
        change = _change(rng, ordinal, name, held)
        held = RESULT[change.sign](held, change.number)
        changes.append(change)
    content = f"{name} {start} {things} {[change.sentence for change in changes]}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return Problem(digest, f"{count} changes", name, things, start, tuple(changes))


def _change(rng: random.Random, ordinal: str, name: str, held: int) -> Change:
    most = {"+": min(40, HELD_MAX - held), "-": min(40, held - 1), "*": min(4, HELD_MAX // held)}
    sign = rng.choice([sign for sign, number in most.items() if number >= _LEAST])
    number = rng.randint(_LEAST, most[sign])
    sentence = f"each becomes {number}." if sign == "*" else f"{name} {rng.choice(VERBS[sign])} {number}."
    return Change(ordinal, sign, number, f"{ordinal} {sentence}")
