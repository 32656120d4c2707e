"""Hand-written events of one session, with a comment on the outcome of each turn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from headrace_schemas import (
    Branch,
    Choice,
    DeadLetter,
    Event,
    Experience,
    LeftOut,
    Message,
    Restored,
    Sampling,
    Span,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
    Turn,
    Undone,
    Usage,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
KEY = "abcdefghijklmnop"
VERSION = "m@0123456789ab"


def turn(turn_id: str, **more: Any) -> Turn:
    choice = Choice(
        index=0, token_ids=(3,), logprobs=(-0.5,), finish_reason="stop", message=Message(role="assistant", content="x")
    )
    fields = {
        "time": START, "turn_id": turn_id, "session_key": KEY, "session_id": "s", "session_source": "header",
        "model": "m", "version": VERSION, "replica_id": "r", "request_digest": "0" * 64,
        "messages": (Message(role="user", content="x"),), "sampling": Sampling(), "prompt_token_ids": (1, 2),
        "choices": (choice,), "usage": Usage(prompt_tokens=2, completion_tokens=1), "started_at": START, **more,
    }  # fmt: skip
    return Turn(**fields)


def branch(*turn_ids: str) -> Branch:
    spans = tuple(
        Span(start=2 * n + 1, logprobs=(-0.5,), turn_id=name, version=VERSION) for n, name in enumerate(turn_ids)
    )
    return Branch(token_ids=(1,) * (2 * len(turn_ids)), spans=spans)


def trajectory(
    name: str, *branches: tuple[str, ...], left_out: dict[str, str] | None = None, **more: Any
) -> Trajectory:
    fields = {
        "time": START, "trajectory_id": name, "session_key": KEY, "session_id": "s", "model": "m",
        "branches": tuple(branch(*ids) for ids in branches), "end_reason": "end_call", "started_at": START,
        "left_out": tuple(LeftOut.model_validate({"turn_id": t, "reason": r}) for t, r in (left_out or {}).items()),
        **more,
    }  # fmt: skip
    return Trajectory(**fields)


def experience(name: str, *turn_ids: str, of: str = "T", revision: int = 0, reward: float | None = 1.0) -> Experience:
    return Experience(
        time=START, experience_id=name, revision=revision, trajectory_id=of, session_key=KEY, session_id="s", model="m",
        branch=branch(*turn_ids), turn_ids=turn_ids, reward=reward, no_reward="no_reward" if reward is None else None,
    )  # fmt: skip


def verdict(
    name: str, *turn_ids: str, revision: int = 0, dropped: str | None = None, detail: str | None = None
) -> TrainingOutcome:
    return TrainingOutcome.model_validate(
        {"experience_id": name, "revision": revision, "turn_ids": turn_ids, "dropped": dropped, "detail": detail}
    )


def report(*verdicts: TrainingOutcome, save: int = 0, lineage: str = "main", at_s: int = 0) -> TrainingMetrics:
    time = START + timedelta(seconds=at_s)
    return TrainingMetrics(time=time, model="m", lineage=lineage, step=save, account=save, verdicts=verdicts)


def undoes(name: str, *, revision: int = 0, queued: bool = False, save: int = 1) -> TrainingMetrics:
    undone = (Undone(experience_id=name, revision=revision, queued=queued),)
    return TrainingMetrics(
        time=START + timedelta(seconds=save), model="m", lineage="main", step=save, account=save, undone=undone
    )


def restores(name: str, *, revision: int = 0, save: int = 2) -> TrainingMetrics:
    restored = (Restored(experience_id=name, revision=revision),)
    return TrainingMetrics(
        time=START + timedelta(seconds=save), model="m", lineage="main", step=save, account=save, restored=restored
    )


def letter(event: Event, service: str) -> DeadLetter:
    return DeadLetter(
        time=START, service=service, source_topic=event.topic, source_partition=0, source_offset=0,
        source_id=event.event_id, source_key=event.key, value_base64="", reason="handler_error", error="boom",
    )  # fmt: skip


TWO = (turn("a"), turn("b"))
CLOSED = (*TWO, trajectory("T", ("a", "b")))
READY = (*CLOSED, experience("E", "a", "b"))
