"""Training of written rows by each algorithm: rejected and bad answers are not learned."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from headrace_schemas import Experience
from headrace_schemas.events.experience import PreferenceSide
from headrace_trainer.algorithms.presets import ALGORITHMS
from headrace_trainer.algorithms.settings import AdvantageSettings
from headrace_trainer.experiences.examples import examples
from tests.unit.trainer.world import experience

VERSION = "m@0123456789abcdef"
Side = Literal["chosen", "rejected"]


def row(*, reward: float | None = None, side: Side | None = None) -> Experience:
    """Return rows as `headrace train` makes them."""
    event = experience(1, VERSION, 0.0)
    sides = (PreferenceSide(preference_id="p", side=side, turn_id=event.turn_ids[0]),) if side else ()
    why = "no_reward" if reward is None else None
    return event.model_copy(update={"origin": "written", "reward": reward, "no_reward": why, "preferences": sides})


def values(name: str, event: Experience) -> list[float]:
    """1 for each example that is made likelier, -1 for each that is made less likely."""
    kind = ALGORITHMS.get(name).advantage
    settings = AdvantageSettings.model_validate({"kind": kind})
    worth = settings.estimator.worth

    def of(reward: float) -> float:
        assert worth is not None
        return worth(reward, settings)

    candidates: list[Any] = [*examples(event, settings.signals, None if worth is None else of, None)]
    return [part.value if part.value is not None else of(event.reward or 0.0) for part in candidates]


@pytest.mark.parametrize(
    ("algorithm", "fields", "trained"),
    [
        ("sft", {}, [1.0]),
        ("sft", {"reward": 0.0}, [1.0]),
        ("sft", {"side": "chosen"}, [1.0]),
        ("sft", {"side": "rejected"}, []),
        ("dpo", {}, []),
        ("dpo", {"side": "chosen"}, [1.0]),
        ("dpo", {"side": "rejected"}, [-1.0]),
        ("kto", {}, [1.0]),
        ("kto", {"reward": 1.0}, [1.0]),
        ("kto", {"reward": 0.0}, [-1.0]),
        ("kto", {"side": "chosen"}, [1.0]),
        ("kto", {"side": "rejected"}, [-1.0]),
        ("rft", {}, []),
        ("rft", {"reward": 1.0}, [1.0]),
        ("rft", {"reward": 0.0}, []),
        ("on_policy_distill", {}, []),
    ],
)
def test_rows_are_trained_as_what_they_say(algorithm: str, fields: dict[str, Any], trained: list[float]) -> None:
    assert values(algorithm, row(**fields)) == trained
