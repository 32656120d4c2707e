"""A run, a session or a feedback that cannot be handled fails alone and by name, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

from headrace_collector import closing, feedback_targets, schema, store, upkeep
from headrace_collector.trajectories import build_trajectory
from headrace_schemas import DeadLetter, Trajectory
from tests.support.streams import Bench
from tests.support.turns import ask, end, feedback, user
from tests.unit.collector.conftest import Open, pass_time

ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed"),
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
}
SESSIONS = 5


def turns() -> list[Any]:
    return [ask([user(f"q{n}")], session=f"s{n}", at=n) for n in range(SESSIONS)]


def closed_sessions(stream: Bench) -> set[str]:
    return {trajectory.session_id for trajectory in stream.sent(Trajectory)}


def dead_lettered(stream: Bench) -> list[tuple[str, str]]:
    return [(letter.reason, letter.source_id) for letter in stream.sent(DeadLetter)]


OTHERS = {f"s{n}" for n in range(SESSIONS)} - {"s2"}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stage", ["build_trajectory", "load_turns", "facts_of_session", "feedback_about_run"])
async def test_session_with_an_error_fails_alone(
    stream: Bench, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    sent = turns()
    victim = sent[2]
    module = {"build_trajectory": closing, "feedback_about_run": feedback_targets}.get(stage, store)
    real = getattr(module, stage)

    def is_victim(arguments: tuple[object, ...]) -> bool:
        return victim.turn_id in repr(arguments) or victim.session_key in repr(arguments)

    if stage in ("build_trajectory", "feedback_about_run"):

        def planted(*arguments: object, **named_: object) -> object:
            if is_victim(arguments):
                raise ERRORS[kind]()
            return real(*arguments, **named_)

        monkeypatch.setattr(module, stage, planted)
    else:

        async def awaited(*arguments: object, **named_: object) -> object:
            if is_victim(arguments):
                raise ERRORS[kind]()
            return await real(*arguments, **named_)

        monkeypatch.setattr(module, stage, awaited)
    await stream.deliver(*sent)
    await stream.deliver(*[end(f"s{n}", at=10) for n in range(SESSIONS)])
    await pass_time(stream, 1)
    assert closed_sessions(stream) == OTHERS
    assert dead_lettered(stream) == [("invalid_trajectory", victim.turn_id)]
    assert await stream.count("ends") == 0, "nothing comes back after a restart"
    await pass_time(stream, 1_000)
    assert len(dead_lettered(stream)) == 1


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 50_000], ids=range(4))
async def test_turn_with_damaged_content_is_dead_lettered_alone(stream: Bench, payload: bytes) -> None:
    sent = turns()
    await stream.deliver(*sent)
    async with stream.processor.database.transaction() as tx:
        is_damaged_turn = schema.turns.c.turn_id == sent[2].turn_id
        await tx.execute(update(schema.turns).where(is_damaged_turn).values(payload=payload))
    await stream.deliver(*[end(f"s{n}", at=10) for n in range(SESSIONS)])
    assert closed_sessions(stream) == OTHERS
    assert dead_lettered(stream) == [("invalid_trajectory", sent[2].turn_id)]


@pytest.mark.parametrize("kind", ERRORS)
async def test_unreadable_idle_session_is_dead_lettered_alone(
    stream: Bench, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sent = turns()
    await stream.deliver(*sent)
    real = store.facts_of_session

    async def planted(tx: Any, session_key: str, since_ms: int) -> object:
        if session_key == sent[2].session_key:
            raise ERRORS[kind]()
        return await real(tx, session_key, since_ms)

    monkeypatch.setattr(store, "facts_of_session", planted)
    for _ in range(3):
        await pass_time(stream, 301)
    assert closed_sessions(stream) == OTHERS
    assert dead_lettered(stream) == [("invalid_trajectory", sent[2].turn_id)]


@pytest.mark.parametrize("kind", ERRORS)
async def test_large_session_with_a_failing_run_loses_no_other_turn(
    with_settings: Open, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The turn that makes the session too large is not the one at fault."""
    async with with_settings(completions_per_session_max=3) as stream:

        def planted(*arguments: Any, **named_: Any) -> object:
            if named_["reason"] == "limit":
                raise ERRORS[kind]()
            return build_trajectory(*arguments, **named_)

        monkeypatch.setattr(closing, "build_trajectory", planted)
        sent = [ask([user(f"q{n}")], session="s", at=n) for n in range(4)]
        for turn in sent:
            await stream.deliver(turn)
        assert {source for _, source in dead_lettered(stream)} == {turn.turn_id for turn in sent[:3]}
        await stream.deliver(end("s", at=10))
        assert [list(trajectory.turn_ids) for trajectory in stream.sent(Trajectory)] == [[sent[3].turn_id]]


@pytest.mark.parametrize("kind", ERRORS)
async def test_feedback_with_a_failing_target_check_is_dead_lettered_alone(
    stream: Bench, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sent = turns()
    await stream.deliver(*sent)
    feedback_events = [feedback(f"s{n}", turn) for n, turn in enumerate(sent)]
    await stream.deliver(*feedback_events)
    real = upkeep._has_target

    async def planted(tx: Any, event: Any) -> bool:
        if event.event_id == feedback_events[2].event_id:
            raise ERRORS[kind]()
        return await real(tx, event)

    monkeypatch.setattr(upkeep, "_has_target", planted)
    await pass_time(stream, 100_000)
    assert ("handler_error", feedback_events[2].event_id) in dead_lettered(stream)
    async with stream.processor.database.transaction() as tx:
        rows = (await tx.execute(schema.feedback.select())).mappings().all()
    assert {row["event_id"] for row in rows} <= {feedback_item.event_id for feedback_item in feedback_events} - {
        feedback_events[2].event_id
    }
    assert all(row["resolved"] for row in rows)
