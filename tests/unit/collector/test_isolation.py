"""Tests that a failure, a large history or another tenant does not affect the rest of the collector.

A run, session or feedback that fails is dead-lettered alone. No timer and no event reads all stored rows. Long runs are
closed in worker threads, so the service stays responsive. Tenants with equal ids stay separate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from sqlalchemy import update

from headrace_collector import closing, feedback_targets, handlers, schema, store, upkeep
from headrace_collector.closing import build_trajectory
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from headrace_schemas import DeadLetter, Event, SessionEnd, Trajectory, Turn
from headrace_schemas.values.ids import response_id, session_key
from tests.support.machine import blocked
from tests.support.remembered import Ages, fill_collector, recorded, scans
from tests.support.streams import Bench
from tests.support.turns import START, after, ask, commit, end, feedback, user
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
    """If the session reaches its limit and one of its runs fails, all other turns are published."""
    monkeypatch.setattr(handlers, "SEQUENCES_MAX", 3)
    async with with_settings() as stream:

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


_TURNS = 20_000
_FEW = 1_000
_PARTIAL = frozenset({"ix_sessions_open", "ix_sessions_over", "ix_sessions_tenant", "ix_turns_kept"})


async def _use(stream: Bench, settings: CollectorSettings) -> None:
    """Deliver every kind of event, and run every timer."""
    turn = ask([user("q")])
    await stream.deliver(turn, feedback("s", turn), feedback("elsewhere"))
    await stream.deliver(ask([user("q")], session="other"), feedback("other"), commit())
    await stream.deliver(end())
    await pass_time(stream, 2000)
    for step in (upkeep.close_surplus_sessions, upkeep.delete_old_rows, upkeep.check_feedback_targets):
        await stream.step(partial(step, settings=settings))
    stream.clock.advance(settings.remember_s * 2)
    await stream.processor.prune()


async def test_the_newest_feedback_of_a_session_is_read_without_sorting_all_of_it(stream: Bench) -> None:
    """Each closing of a run reads it, and a session may have any number of feedback."""
    await stream.deliver(*(feedback("s", feedback_id=f"f{number}") for number in range(9)))
    database = stream.processor.database
    with recorded(database) as statements:
        async with database.transaction() as tx:
            await store.feedback_of_session(tx, session_key("default", "s"), "default", 0)
    async with stream.aborted() as tx:
        if tx.dialect.name == "postgresql":  # so that it sorts only where no index has the order
            for kind in ("seqscan", "bitmapscan", "sort"):
                await tx.exec_driver_sql(f"SET LOCAL enable_{kind} = off")
        explain = "EXPLAIN QUERY PLAN" if tx.dialect.name == "sqlite" else "EXPLAIN"
        for sql, parameters in statements.found.items():
            plan = (await tx.exec_driver_sql(f"{explain} {sql}", parameters)).all()
            assert not any("TEMP B-TREE" in str(step) or "Sort" in str(step) for step in plan), (sql, plan)


async def test_queries_never_scan_whole_tables(with_settings: Open) -> None:
    async with with_settings() as stream:
        settings = CollectorSettings()
        ages = Ages(epoch_ms(START), settings.remember_s, old=300, kept=300, open=100)
        await fill_collector(stream.processor.database, _TURNS, ages, lambda _inserted, _total: None)
        with recorded(stream.processor.database) as statements:
            await _use(stream, settings)
        assert len(statements.found) > 20
        async with stream.aborted() as tx:
            assert await scans(tx, statements, partial=_PARTIAL, rows_max=_FEW) == []


_LARGE_RUNS_TURNS, _TOKENS = 24, 60_000
_BLOCK_S_MAX = 0.1


def _run() -> list[Turn]:
    """Return the turns of one conversation; each prompt contains the previous turn, as in an agent with long
    context."""
    turns: list[Turn] = []
    prompt = tuple(range(1, _TOKENS))
    for at in range(_LARGE_RUNS_TURNS):
        messages = after(turns[-1], user(f"more {at}")) if turns else [user("q")]
        fields: dict[str, Any] = {"prompt_token_ids": prompt, "turn_id": response_id(session_key("default", "s"))}
        turns.append(ask(messages, "yes", at=float(at), **fields))
        prompt = (*prompt, *turns[-1].choices[0].token_ids, 5, 6)
    return turns


async def test_closing_a_long_run_does_not_block_the_event_loop(with_settings: Open) -> None:
    turns = _run()
    async with with_settings() as stream:
        for turn in turns:
            await stream.deliver(turn)
        async with blocked() as block:
            await stream.deliver(end())
            await pass_time(stream, 1.0)
        (trajectory,) = stream.sent(Trajectory)
    assert trajectory.turn_ids == tuple(turn.turn_id for turn in turns)
    assert block.busy_s < _BLOCK_S_MAX, f"{1000 * block.busy_s:.0f} ms"


@pytest.mark.parametrize("tokens", [10, 40_000])
async def test_runs_of_every_size_give_the_same_trajectory(with_settings: Open, tokens: int) -> None:
    """Short runs are processed on the event loop, long runs in a thread, with equal results."""
    turn = ask([user("q")], "yes", prompt_token_ids=tuple(range(1, tokens)))
    async with with_settings() as stream:
        await stream.deliver(turn, end())
        (trajectory,) = stream.sent(Trajectory)
    assert trajectory.branches[0].token_ids == (*turn.prompt_token_ids, *turn.choices[0].token_ids)


TENANTS = (("default", "b"), ("b", "default"), ("a", "b"), ("a/b", "a"))


def _copy_for_tenant(events: Sequence[Event], tenant: str) -> list[Event]:
    """Return copies of `events` for `tenant`, with unchanged ids and keys."""
    return [event.model_copy(update={"tenant": tenant}) for event in events]


def _commit(tenant: str) -> SessionEnd:
    return SessionEnd(time=end().time, end_id="commit", scope="tenant", tenant=tenant, reason="commit", partition=0)


def _published(stream: Bench, tenant: str) -> list[dict[str, Any]]:
    trajectories = [trajectory for trajectory in stream.sent(Trajectory) if trajectory.tenant == tenant]
    return [event.model_dump(exclude={"time", "turns_from"}) for event in trajectories]


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_equal_ids_of_another_tenant_change_nothing(with_settings: Open, mine: str, other: str) -> None:
    first = ask([user("q")], "yes", tenant=mine)
    second = ask(after(first, user("more")), "ok", tenant=mine, at=2)
    turns: list[Event] = [first, second]
    opinions: list[Event] = [
        feedback("s", first, second, tenant=mine, feedback_id="f", value=1.0, task_id="t", run_id="r"),
        feedback("s", tenant=mine, feedback_id="g", value=None, context={"expected": "yes"}),
    ]
    ending: list[Event] = [feedback("s", tenant=mine, feedback_id="h", value=0.5, ends_session=True)]
    foreign: list[Event] = [
        feedback("s", first, tenant=mine, feedback_id="i", value=None, task_id="x", ends_session=True),
        end(tenant=mine),
        _commit(mine),
    ]
    copies = [*_copy_for_tenant([*opinions, *ending, *foreign], other)]
    results = []
    for foreign_turns in ((), copies):
        async with with_settings() as stream:
            await stream.deliver(*foreign_turns)
            for event in (*turns, *opinions):
                await stream.deliver(event)
                await stream.deliver(*foreign_turns)
                assert _published(stream, mine) == []
            await stream.deliver(*ending)
            await stream.deliver(*foreign_turns)
            await pass_time(stream, 1.0)
            results.append(_published(stream, mine))
            assert stream.sent(DeadLetter) == []
    assert results[0] == results[1]
    assert len(results[0]) == 1


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_forged_turns_are_dead_lettered_with_the_reason(with_settings: Open, mine: str, other: str) -> None:
    """A turn with another tenant's session key or with the id of another session's turn changes nothing of the other
    session."""
    turn = ask([user("q")], "yes", tenant=mine)
    foreign_turn = ask([user("q")], "no", tenant=other)
    forged = [
        turn.model_copy(update={"tenant": other}),
        foreign_turn.model_copy(update={"turn_id": turn.turn_id}),
        foreign_turn.model_copy(update={"session_key": turn.session_key}),
        ask([user("q")], tenant=other, turn_id="own-name"),
        ask([user("q")], tenant=mine, turn_id="own-name"),
    ]
    async with with_settings() as stream:
        await stream.deliver(*forged)
        await stream.deliver(turn, end(tenant=mine))
        reasons = sorted(letter.reason for letter in stream.sent(DeadLetter))
        assert reasons == ["foreign_session_key", "foreign_session_key", "foreign_turn_id", "turn_taken"]
        assert [trajectory["branches"][0]["spans"][0]["turn_id"] for trajectory in _published(stream, mine)] == [
            turn.turn_id
        ]
