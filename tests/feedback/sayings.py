"""What people say in this world: a random sequence of statements about known answers, each also as a request.

A statement keeps what it means in its own words, for the oracle, and its request, for the gateway.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Answer = tuple[str, int]
"""A turn's id and one of its choices."""
Form = Literal["number", "thumb", "rating", "label", "parts", "edit", "preference", "facts"]
Where = Literal["session", "all turns", "some turns", "turns", "answer", "task", "pair"]

LABELS: Mapping[str, float] = {"good": 1.0, "meh": 0.4, "bad": 0.0}
_WORDS = (*LABELS, "unheard-of")
_SOURCES = ("feedback", "user", "crowd")
_RATERS = (None, "ann", "bob")
_METRICS = (None, None, None, "tone", "truth")
_FORMS: tuple[tuple[Form, int], ...] = (
    ("number", 20), ("thumb", 10), ("rating", 10), ("label", 10), ("parts", 8), ("edit", 16), ("preference", 22),
    ("facts", 4),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """One session that is talked about."""

    session_id: str
    task_id: str | None
    turns: Mapping[str, int]
    """Turn to how many answers it has."""

    @property
    def answers(self) -> list[Answer]:
        return [(turn, choice) for turn, choices in self.turns.items() for choice in range(choices)]


@dataclass(frozen=True, slots=True)
class Saying:
    """One statement. `place` is where it stands in the order of the log."""

    place: int
    form: Form
    where: Where
    scene: Scene
    source: str
    rater: str | None
    metric: str | None = None
    turns: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    """The answer that is meant, or chosen and rejected."""
    said: Any = None
    withdrawn: bool = False
    named_as: str = ""
    skew_s: float = 0.0

    @property
    def request(self) -> dict[str, Any]:
        """The body of `POST /v1/feedback`."""
        body: dict[str, Any] = {"feedback_id": self.named_as, "source": self.source, "comment": f"number {self.place}"}
        body |= {"rater": self.rater, "metric": self.metric}
        body |= self._target() | ({"withdrawn": True} if self.withdrawn else self._form())
        if self.withdrawn and self.form == "edit":
            body["kind"] = "edit"
        return {name: value for name, value in body.items() if value is not None}

    def _form(self) -> dict[str, Any]:
        if self.form in ("number", "thumb"):
            return {"value": self.said}
        if self.form == "rating":
            rating, scale = self.said
            return {"rating": rating, "scale": scale}
        if self.form == "facts":
            return {"context": {"noted": self.place}}
        return {} if self.form == "preference" else {self.form: self.said}

    def _target(self) -> dict[str, Any]:
        if self.where == "pair":
            chosen, rejected = self.answers
            if chosen[0] == rejected[0]:
                return {"response_id": chosen[0], "preference": {"chosen": chosen[1], "rejected": rejected[1]}}
            sides = [{"response_id": turn, "choice": choice} if choice else turn for turn, choice in (chosen, rejected)]
            return {"preference": {"chosen": sides[0], "rejected": sides[1]}}
        if self.where == "answer":
            ((turn, choice),) = self.answers
            return {"response_id": turn, "choice": choice}
        if self.where == "task":
            return {"level": "task", "task_id": self.scene.task_id}
        if self.where == "session":
            return {"session_id": self.scene.session_id}
        level = {"level": "turn"} if self.where == "turns" else {}
        return {"msg_ids": list(self.turns), **level}


@dataclass
class Talk:
    """Draws statements. A `revised` share of them changes an earlier one, a `withdrawn` share takes one back."""

    scenes: Sequence[Scene]
    seed: int
    revised: float = 0.34
    withdrawn: float = 0.1
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def sayings(self, count: int) -> list[Saying]:
        found: list[Saying] = []
        for place in range(count):
            chance = self._draw.random()
            if found and chance < self.withdrawn:
                made = self._take_back(self._draw.choice(found), place)
            elif found and chance < self.withdrawn + self.revised:
                made = self._again(self._draw.choice(found), place)
            else:
                made = self._new(place)
            found.append(replace(made, named_as=f"f{place}", skew_s=self._draw.uniform(-3600, 3600)))
        return found

    def _new(self, place: int) -> Saying:
        draw, scene = self._draw, self._draw.choice(self.scenes)
        (form,) = draw.choices([form for form, _ in _FORMS], [weight for _, weight in _FORMS])
        made = Saying(place, form, "session", scene, draw.choice(_SOURCES), draw.choice(_RATERS))
        if form == "preference":
            other = scene if draw.random() < 0.5 else draw.choice(self.scenes)
            pair = [draw.choice(scene.answers), draw.choice(other.answers)]
            if pair[0] == pair[1]:
                return self._new(place)
            return replace(made, where="pair", answers=tuple(pair), metric=draw.choice(_METRICS))
        if form == "edit":
            return self._worded(replace(made, where="answer", answers=(draw.choice(scene.answers),)))
        metric = draw.choice(_METRICS) if form != "parts" else None
        return self._worded(self._aimed(replace(made, metric=metric)))

    def _aimed(self, made: Saying) -> Saying:
        draw, turns = self._draw, list(made.scene.turns)
        wheres: list[Where] = ["session", "all turns", "turns", "answer"]
        wheres += ["some turns"] if len(turns) > 1 else []
        wheres += ["task", "task", "task"] if made.scene.task_id else []
        where = draw.choice(wheres)
        if where == "answer":
            return replace(made, where=where, answers=(draw.choice(made.scene.answers),))
        some = {
            "all turns": turns,
            "some turns": draw.sample(turns, max(1, len(turns) - 1)),
            "turns": [draw.choice(turns)],
        }
        return replace(made, where=where, turns=tuple(some.get(where, ())))

    def _worded(self, made: Saying) -> Saying:
        draw = self._draw
        words: dict[Form, Any] = {
            "number": round(draw.uniform(-1, 1), 3),
            "thumb": draw.random() < 0.5,
            "rating": (draw.randint(1, 5), [1, 5]),
            "label": draw.choice(_WORDS),
            "parts": {name: round(draw.random(), 2) for name in draw.sample(["tone", "truth", "care"], 2)},
            "edit": draw.choice([f"better {made.place}", self._call(made.place)]),
        }
        return replace(made, said=words.get(made.form))

    @staticmethod
    def _call(number: int) -> dict[str, Any]:
        return {"tool_calls": [{"function": {"name": "look", "arguments": f'{{"at": {number}}}'}}]}

    def _again(self, old: Saying, place: int) -> Saying:
        """The same rater about the same, with another word; a number may become a thumb, a preference may turn."""
        draw = self._draw
        if old.form == "preference":
            turned = old.answers if draw.random() < 0.3 else (old.answers[1], old.answers[0])
            return replace(old, place=place, answers=turned, withdrawn=False)
        forms: list[Form] = [old.form] if old.form in ("edit", "facts") else ["number", "thumb", "rating", "label"]
        made = replace(old, place=place, form=draw.choice(forms), withdrawn=False)
        return self._worded(made)

    def _take_back(self, old: Saying, place: int) -> Saying:
        return replace(old, place=place, withdrawn=True)
