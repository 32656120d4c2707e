"""Experiences with edits and preferences, for tests."""

from __future__ import annotations

from typing import Any, Literal

from headrace_schemas import Branch, Experience
from headrace_schemas.events.chat import Message
from headrace_schemas.events.experience import Edit, PreferenceSide, TurnReward
from tests.unit.trainer.world import experience

WORDS = ("the agent", "a question", "search", "Monday", "an invoice", "nobody")


def edit(text: str, turn: str, source: str = "feedback") -> Edit:
    return Edit(turn_id=turn, source=source, message=Message(role="assistant", content=text))


def side(name: str, which: Literal["chosen", "rejected"], turn: str) -> PreferenceSide:
    return PreferenceSide(preference_id=name, side=which, turn_id=turn)


def with_signals(
    number: int,
    version: str,
    *,
    edits: tuple[Edit, ...] = (),
    preferences: tuple[PreferenceSide, ...] = (),
    turn_rewards: tuple[TurnReward, ...] = (),
    origin: Literal["sampled", "written"] = "sampled",
    tenant: str = "default",
    reward: float | None = None,
    **fields: Any,
) -> Experience:
    """Return `experience` with the given signals; it has a reward only if one is given."""
    signals = {"edits": edits, "preferences": preferences, "turn_rewards": turn_rewards}
    plain = experience(number, version, reward, **{"no_reward": "no_reward", **fields})
    branch = plain.branch
    if origin == "written" and branch is not None:
        spans = tuple(span.model_copy(update={"logprobs": (0.0,) * len(span.logprobs)}) for span in branch.spans)
        branch = Branch(token_ids=branch.token_ids, spans=spans)
    update = {**signals, "origin": origin, "tenant": tenant, "branch": branch}
    return Experience.model_validate({**plain.model_copy(update=update).model_dump(mode="json")})


def turn(number: int, index: int = 0) -> str:
    """The name that `experience` gives a turn."""
    return f"turn-{number}-{index}"
