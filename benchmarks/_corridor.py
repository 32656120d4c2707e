"""Task of nine turns: eight rooms, each with a sign that determines which of three doors is right.

Only the end of a run shows whether all doors were right. A base that takes the right door in every other room reaches
the exit in four of a thousand runs. The reward of a run therefore has little information about its single turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_parts import base_model, warm_up
from example_parts.base_model import Lesson
from example_parts.react import ERROR, Agent, WrongCall, definition, only_argument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOMS = 8
DOORS = ("left", "ahead", "right")
SIGNS = ("moon", "star", "tree", "wave", "bird", "key", "crown", "leaf", "bell", "ship", "lamp", "rose")
DOOR_OF = {sign: DOORS[index % len(DOORS)] for index, sign in enumerate(SIGNS)}
EXIT = "exit"
TOOL, PARAMETER = "take_door", "door"
DEFINITIONS = [definition(TOOL, "Go through a door of this room.", PARAMETER, f"One of {', '.join(DOORS)}.")]
AGENT = Agent("Find the way out. Take the door that the sign tells.", DEFINITIONS, ROOMS + 1)
RIGHT_SHARE = 0.5
"""Share of right doors in the warm-up."""


@dataclass(frozen=True)
class Walk:
    """The signs of the rooms, in order."""

    signs: tuple[str, ...]
    kind: str = "walk"

    @property
    def id(self) -> str:
        return "-".join(self.signs)

    @property
    def question(self) -> str:
        return f"The sign is {self.signs[0]}"


class Rooms:
    """The rooms of a run. Every door leads to the next room."""

    def __init__(self, walk: Walk) -> None:
        self._signs = iter((*walk.signs[1:], EXIT))

    def call(self, name: str, arguments: str) -> str:
        """Return the next sign. For an invalid call return a text that begins with `ERROR`; the run moves to the next
        room as well."""
        sign = next(self._signs, EXIT)
        try:
            chosen = only_argument(arguments, PARAMETER)
        except WrongCall as problem:
            return f"{ERROR}{problem}"
        return sign if name == TOOL and chosen in DOORS else f"{ERROR}no such door"


def walks(split: str, seed: int) -> Iterator[Walk]:
    """Yield walks without end. The last sign of a walk belongs to one split only, so that splits share no walk."""
    rng = random.Random(f"corridor {split} {seed}")
    last_signs = SIGNS[8:] if split == "audit" else SIGNS[:8]
    while True:
        yield Walk((*rng.sample(SIGNS, ROOMS - 1), rng.choice(last_signs)))


def doors(messages: Sequence[Any]) -> list[str | None]:
    """Return the door that the agent took in each turn, or None for an invalid call."""
    chosen_doors: list[str | None] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            try:
                chosen_doors.append(only_argument(call["function"]["arguments"], PARAMETER))
            except WrongCall:
                chosen_doors.append(None)
    return chosen_doors


def right_doors(walk: Walk, messages: Sequence[Any]) -> list[bool]:
    """Return for each room that the agent left whether the door was right."""
    return [chosen == DOOR_OF[sign] for sign, chosen in zip(walk.signs, doors(messages), strict=False)]


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """Warm-up schedule with wrong doors from the beginning, because there are no right answers to copy that must be
    learned first."""

    steps: int = 160
    right_share: float = 0.0
    doors_right: float = RIGHT_SHARE


def conversations(schedule: Schedule, seed: int) -> list[list[dict[str, Any]]]:
    """Return all conversations of the warm-up, in order."""
    rng, source = random.Random(f"corridor warm-up {seed}"), walks("train", -1 - seed)
    return [_conversation(next(source), rng, schedule.doors_right) for _ in range(schedule.shown)]


def _conversation(walk: Walk, rng: random.Random, doors_right: float) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": AGENT.system},
        {"role": "user", "content": walk.question},
    ]
    rooms = Rooms(walk)
    for sign in walk.signs:
        right = DOOR_OF[sign]
        chosen = right if rng.random() < doors_right else rng.choice([other for other in DOORS if other != right])
        function = {"name": TOOL, "arguments": json.dumps({PARAMETER: chosen})}
        call = {"id": "call", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        answer = rooms.call(TOOL, function["arguments"])
        messages.append({"role": "tool", "tool_call_id": "call", "content": answer})
    return [*messages, {"role": "assistant", "content": "out"}]


def _tokenizer(texts: Iterable[str]) -> Tokenizer:
    words = (*DOORS, *SIGNS, EXIT, "out", *AGENT.system.replace(".", "").split(), "sign", "is", TOOL)
    return base_model.train_tokenizer(texts, words, (base_model.call_opening(TOOL, PARAMETER), '"}}', TOOL), 420)


LESSON = Lesson(
    name="corridor",
    folder=Path(__file__).parent,
    modules=("_corridor",),
    definitions=DEFINITIONS,
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=_tokenizer,
)
