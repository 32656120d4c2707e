"""Random sequence of feedback about known answers, each with its request.

An entry has its meaning for the oracle and its request for the gateway.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Answer = tuple[str, int]
"""A turn's id and one of its choices."""
Form = Literal["number", "thumb", "rating", "label", "parts", "edit", "preference", "facts"]
Sampled = Literal["free", "temperature 0", "top_p", "foreign"]
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
    sampled: Mapping[str, Sampled] = field(default_factory=dict)
    """Turn to how its answers were sampled; `free` where it has no entry."""

    @property
    def answers(self) -> list[Answer]:
        return [(turn, choice) for turn, choices in self.turns.items() for choice in range(choices)]


@dataclass(frozen=True, slots=True)
class Saying:
    """One statement. `place` is where it stands in the order of the log."""

    number: int
    form: Form
    where: Where
    scene: Scene
    source: str
    rater: str | None
    metric: str | None = None
    turns: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    """The answer that is meant, or chosen and rejected."""
    content: Any = None
    withdrawn: bool = False
    named_as: str = ""
    skew_s: float = 0.0

    @property
    def request(self) -> dict[str, Any]:
        """The body of `POST /v1/feedback`."""
        body: dict[str, Any] = {"feedback_id": self.named_as, "source": self.source, "comment": f"number {self.number}"}
        body |= {"rater": self.rater, "metric": self.metric}
        body |= self._target() | ({"withdrawn": True} if self.withdrawn else self._form())
        if self.withdrawn and self.form == "edit":
            body["kind"] = "edit"
        return {name: value for name, value in body.items() if value is not None}

    def _form(self) -> dict[str, Any]:
        if self.form in ("number", "thumb"):
            return {"value": self.content}
        if self.form == "rating":
            rating, scale = self.content
            return {"rating": rating, "scale": scale}
        if self.form == "facts":
            return {"context": {"noted": self.number}}
        return {} if self.form == "preference" else {self.form: self.content}

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
        sayings: list[Saying] = []
        for number in range(count):
            chance = self._draw.random()
            if sayings and chance < self.withdrawn:
                saying = self._take_back(self._draw.choice(sayings), number)
            elif sayings and chance < self.withdrawn + self.revised:
                saying = self._again(self._draw.choice(sayings), number)
            else:
                saying = self._new(number)
            sayings.append(replace(saying, named_as=f"f{number}", skew_s=self._draw.uniform(-3600, 3600)))
        return sayings

    def _new(self, number: int) -> Saying:
        draw, scene = self._draw, self._draw.choice(self.scenes)
        (form,) = draw.choices([form for form, _ in _FORMS], [weight for _, weight in _FORMS])
        saying = Saying(number, form, "session", scene, draw.choice(_SOURCES), draw.choice(_RATERS))
        if form == "preference":
            other = scene if draw.random() < 0.5 else draw.choice(self.scenes)
            pair = [draw.choice(scene.answers), draw.choice(other.answers)]
            if pair[0] == pair[1]:
                return self._new(number)
            return replace(saying, where="pair", answers=tuple(pair), metric=draw.choice(_METRICS))
        if form == "edit":
            return self._worded(replace(saying, where="answer", answers=(draw.choice(scene.answers),)))
        metric = draw.choice(_METRICS) if form != "parts" else None
        return self._worded(self._aimed(replace(saying, metric=metric)))

    def _aimed(self, saying: Saying) -> Saying:
        draw, turns = self._draw, list(saying.scene.turns)
        wheres: list[Where] = ["session", "all turns", "turns", "answer"]
        wheres += ["some turns"] if len(turns) > 1 else []
        wheres += ["task", "task", "task"] if saying.scene.task_id else []
        where = draw.choice(wheres)
        if where == "answer":
            return replace(saying, where=where, answers=(draw.choice(saying.scene.answers),))
        some = {
            "all turns": turns,
            "some turns": draw.sample(turns, max(1, len(turns) - 1)),
            "turns": [draw.choice(turns)],
        }
        return replace(saying, where=where, turns=tuple(some.get(where, ())))

    def _worded(self, saying: Saying) -> Saying:
        draw = self._draw
        words: dict[Form, Any] = {
            "number": round(draw.uniform(-1, 1), 3),
            "thumb": draw.random() < 0.5,
            "rating": (draw.randint(1, 5), [1, 5]),
            "label": draw.choice(_WORDS),
            "parts": {name: round(draw.random(), 2) for name in draw.sample(["tone", "truth", "care"], 2)},
            "edit": draw.choice([f"better {saying.number}", self._call(saying.number)]),
        }
        return replace(saying, content=words.get(saying.form))

    @staticmethod
    def _call(number: int) -> dict[str, Any]:
        return {"tool_calls": [{"function": {"name": "look", "arguments": f'{{"at": {number}}}'}}]}

    def _again(self, old: Saying, number: int) -> Saying:
        """Repeat the rater's feedback with another value; a number may become a thumb, a preference may turn."""
        draw = self._draw
        if old.form == "preference":
            turned = old.answers if draw.random() < 0.3 else (old.answers[1], old.answers[0])
            return replace(old, number=number, answers=turned, withdrawn=False)
        forms: list[Form] = [old.form] if old.form in ("edit", "facts") else ["number", "thumb", "rating", "label"]
        saying = replace(old, number=number, form=draw.choice(forms), withdrawn=False)
        return self._worded(saying)

    def _take_back(self, old: Saying, number: int) -> Saying:
        return replace(old, number=number, withdrawn=True)
