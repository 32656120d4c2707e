"""Word problems of several steps, in sets without a common question."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["warm_up", "train", "gate", "audit"]
"""Sets of problems: the base model's warm-up, the agent's own traffic, the gate, which decides about versions, and the
audit, which only measures."""
SPLITS: tuple[Split, ...] = Split.__args__  # type: ignore[attr-defined]

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin", "Leon", "Mia", "Nora",
    "Oscar", "Paula",
)  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "nuts", "pens", "shells", "stamps")
ORDINALS: Mapping[int, tuple[str, ...]] = {2: ("First", "Last"), 3: ("First", "Next", "Last")}
"""First words of the changes of a problem, by their number."""
VERBS: Mapping[str, tuple[str, ...]] = {"+": ("buys", "finds", "picks"), "-": ("loses", "sells", "eats")}
RESULT: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda amount, number: amount + number,
    "-": lambda amount, number: amount - number,
    "*": lambda amount, number: amount * number,
}
HELD_MAX = 199
"""Largest number in a problem. Numbers up to this one are single tokens."""
_LEAST = 2
"""Smallest number in a change."""


@dataclass(frozen=True)
class Change:
    """One sentence of a problem."""

    ordinal: str
    sign: str
    number: int
    sentence: str


@dataclass(frozen=True)
class Problem:
    """A question with one right answer. Each change needs two steps: a thought and a call."""

    id: str
    kind: str
    name: str
    item_name: str
    start: int
    changes: tuple[Change, ...]

    @property
    def question(self) -> str:
        sentences = " ".join(change.sentence for change in self.changes)
        return f"{self.opening} {sentences} How many {self.item_name} are there now?"

    @property
    def opening(self) -> str:
        return f"{self.name} has {self.start} {self.item_name}."

    @property
    def expected(self) -> int:
        amount = self.start
        for change in self.changes:
            amount = RESULT[change.sign](amount, change.number)
        return amount

    @property
    def steps_min(self) -> int:
        return 2 * len(self.changes)

    @property
    def split(self) -> Split:
        """Split of the problem, determined by the question alone, so that splits share no question."""
        return SPLITS[int(self.id, 16) % len(SPLITS)]


def stream(split: Split, seed: int) -> Iterator[Problem]:
    """Yield different problems of a split without end, alternately with two and three changes."""
    rng = random.Random(f"problems {split} {seed}")
    seen: set[str] = set()
    for count in itertools.cycle(ORDINALS):
        while (problem := _problem(rng, count)).split != split or problem.id in seen:
            pass
        seen.add(problem.id)
        yield problem


def _problem(rng: random.Random, count: int) -> Problem:
    name, item_name, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(12, 60)
    amount, changes = start, []
    for ordinal in ORDINALS[count]:
        change = _change(rng, ordinal, name, amount)
        amount = RESULT[change.sign](amount, change.number)
        changes.append(change)
    content = f"{name} {start} {item_name} {[change.sentence for change in changes]}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return Problem(digest, f"{count} changes", name, item_name, start, tuple(changes))


def _change(rng: random.Random, ordinal: str, name: str, amount: int) -> Change:
    most = {"+": min(40, HELD_MAX - amount), "-": min(40, amount - 1), "*": min(4, HELD_MAX // amount)}
    sign = rng.choice([sign for sign, number in most.items() if number >= _LEAST])
    number = rng.randint(_LEAST, most[sign])
    sentence = f"each becomes {number}." if sign == "*" else f"{name} {rng.choice(VERBS[sign])} {number}."
    return Change(ordinal, sign, number, f"{ordinal} {sentence}")
