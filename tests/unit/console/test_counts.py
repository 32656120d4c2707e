"""Tests that the read model counts like the turn account for any order, repetition and batches of the events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, select, text

from headrace_console.read_model import queries, status, tables
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.follower import TopicFollower
from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.reward_queries import rewards_by_source
from headrace_console.read_model.rows import ExperienceRow, Names
from headrace_console.settings import Scope
from headrace_operations.turn_account import turn_account_of
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka.wire import Record, encode
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_schemas import Event, RevertedOutcome, Reward, TrainingOutcome, Trajectory
from headrace_schemas.events.checkpoint import RestoredOutcome
from headrace_schemas.values.ids import response_id, session_key
from tests.support.presence import draw_seed
from tests.support.remembered import make_tables
from tests.support.turns import START, experience, letter, report, trajectory, turn, verdict
from tests.unit.cli.test_turn_account import STATES

EVERYTHING = Scope(None)
DAY = 20_000


async def read(database: Database, events: Sequence[Event], chance: random.Random) -> None:
    """Apply `events` in batches of random sizes. Roll every fifth batch back and apply it again."""
    names, at = Names(), 0
    while at < len(events):
        size = chance.choice((1, 2, 5, 40))
        log_events = [LogEvent(event, 0, at + number) for number, event in enumerate(events[at : at + size])]
        if chance.random() < 0.2:
            async with database.transaction() as tx:
                savepoint = await tx.begin_nested()
                await Batch(tx, names, titles=True, day=DAY).apply(log_events)
                await savepoint.rollback()
        async with database.transaction() as tx:
            await Batch(tx, names, titles=True, day=DAY).apply(log_events)
        at += size


async def counted(database: Database) -> tuple[int, int, dict[str, int], dict[str, int]]:
    async with database.transaction() as tx:
        counts = await queries.counts(tx, EVERYTHING)
    return counts.captured, counts.trained, dict(counts.waiting), dict(counts.dropped)


def accounted(events: Sequence[Event]) -> tuple[int, int, dict[str, int], dict[str, int]]:
    account = turn_account_of(events, complete=False)
    return account.captured, account.trained, dict(account.waiting), dict(account.dropped)


@pytest.mark.parametrize("name", STATES)
async def test_counts_equal_each_state_of_the_account(name: str, data_dir: Path) -> None:
    events, expected = STATES[name]
    database = Database.open("console", Common.model_validate({"data_dir": data_dir}))
    await make_tables(database, "headrace_console")
    chance = random.Random(draw_seed())
    several = chance.sample([*events, *events], 2 * len(events))
    await read(database, several, chance)
    assert await counted(database) == expected
    await database.close()


Outcomes = list[TrainingOutcome | RevertedOutcome | RestoredOutcome]


def random_history(chance: random.Random, sessions: int) -> list[Event]:
    """Return the events of `sessions` that end in random states, with two tenants, two lineages and ingested
    sessions."""
    events: list[Event] = []
    saves: dict[str, list[Outcomes]] = {"main": [], "replay": []}
    for number in range(sessions):
        events += _session(chance, number)
    for published in [event for event in events if isinstance(event, Trajectory)]:
        trained = published.trajectory_id.startswith("T") and published.purpose == "train" and not published.untrained
        if trained and chance.random() < 0.8:
            events += _experiences(chance, published, saves)
    for lineage, lineage_saves in saves.items():
        for save, items in enumerate(lineage_saves):
            changes = {
                "verdicts": tuple(item for item in items if isinstance(item, TrainingOutcome)),
                "undone": tuple(item for item in items if isinstance(item, RevertedOutcome)),
                "restored": tuple(item for item in items if isinstance(item, RestoredOutcome)),
                # No two reports have the same time, because then the order would decide which lineage counts.
                "time": START + timedelta(seconds=2 * save + (lineage == "main")),
            }
            events.append(report(save=save, lineage=lineage).model_copy(update=changes))
    return events


def _session(chance: random.Random, number: int) -> list[Event]:
    """Return the turns of a session, in most cases its trajectory, and dead letters about some of them."""
    tenant = chance.choice(("default", "other"))
    key = session_key(tenant, f"s{number}")
    more: dict[str, Any] = {"tenant": tenant, "session_key": key, "session_id": f"s{number}"}
    ids = [chance.choice((response_id(key), f"foreign-{number}-{at}")) for at in range(chance.randint(1, 4))]
    purpose = "eval" if chance.random() < 0.1 else "train"
    untrained = "registered" if chance.random() < 0.1 and purpose == "train" else None
    end_reason = "ingest" if chance.random() < 0.15 else "idle"
    events: list[Event] = [turn(name, purpose=purpose, untrained=untrained, **more) for name in ids]
    if chance.random() < 0.1:
        events.append(letter(events[0], "collector"))
    if end_reason == "ingest":
        events = []
    elif chance.random() < 0.15:
        return events
    left = {ids[-1]: "retried"} if len(ids) > 1 and chance.random() < 0.3 else {}
    branch_ids = tuple(name for name in ids if name not in left)
    branches = [branch_ids] if chance.random() < 0.7 else [branch_ids[:1], branch_ids]
    more |= {"end_reason": end_reason}
    run = trajectory(f"T{number}", *branches, left_out=left, purpose=purpose, untrained=untrained, **more)
    events.append(run)
    if chance.random() < 0.1:
        events.append(letter(run, "scorer"))
    elif end_reason != "ingest" and chance.random() < 0.1:
        double = trajectory(f"U{number}", branch_ids, **more)
        events += [double, letter(double, "scorer")]
    return events


def _experiences(chance: random.Random, run: Trajectory, saves: dict[str, list[Outcomes]]) -> list[Event]:
    """Return the experiences of the trajectory `run`, and add their outcomes in each lineage to `saves`."""
    events: list[Event] = []
    of_session = {name: getattr(run, name) for name in ("tenant", "session_key", "session_id")}
    for at, branch in enumerate(run.branches):
        name = f"{run.trajectory_id}-{at}"
        revisions = [
            experience(name, *branch.turn_ids, of=run.trajectory_id, revision=revision).model_copy(update=of_session)
            for revision in range(chance.randint(1, 3))
        ]
        events += revisions
        if chance.random() < 0.1:
            events.append(letter(revisions[-1], "trainer"))
        for lineage_saves in saves.values():
            lineage_saves += _outcomes(chance, name, branch.turn_ids, len(revisions))
    return events


def _outcomes(chance: random.Random, name: str, turn_ids: Sequence[str], revisions: int) -> list[Outcomes]:
    """Return the outcomes that a lineage saves for one experience: outcomes of its revisions, and reversals."""
    saves: list[Outcomes] = []
    for revision in range(revisions):
        outcome_kind = chance.choice(
            ("unseen", "trained", "partly", "stale", "excluded", "undone", "queued", "again", "restored")
        )
        if outcome_kind == "unseen":
            continue
        dropped = {"stale": "stale", "excluded": "withdrawn"}.get(outcome_kind)
        detail = "excluded" if outcome_kind == "excluded" else None
        outcome = verdict(name, *turn_ids, revision=revision, dropped=dropped, detail=detail)
        if outcome_kind == "partly":
            outcome = outcome.model_copy(update={"left_out": tuple(turn_ids[:1])})
        saves.append([outcome])
        if outcome_kind in ("undone", "queued", "again", "restored"):
            saves.append(
                [RevertedOutcome(experience_id=name, revision=revision, queued=outcome_kind in ("queued", "again"))]
            )
        if outcome_kind == "again":
            saves.append([outcome])
        if outcome_kind == "restored":
            saves.append([RestoredOutcome(experience_id=name, revision=revision)])
    return saves


async def test_counts_equal_the_account_for_any_order_repetition_and_cut(database: Database) -> None:
    chance = random.Random(draw_seed())
    events = random_history(chance, 60)
    await read(database, events, chance)
    assert await counted(database) == accounted(events)
    everything = [*events, *chance.choices(events, k=len(events) // 3)]
    chance.shuffle(everything)
    for table in reversed(tables.metadata.sorted_tables):
        async with database.transaction() as tx:
            await tx.execute(table.delete())
    cut = chance.randrange(len(everything))
    await read(database, everything[:cut], chance)
    assert await counted(database) == accounted(everything[:cut])
    await read(database, everything[cut:], chance)
    assert await counted(database) == accounted(everything)
    await check_sessions(database)


async def test_names_of_sources_and_versions_are_bounded_and_counts_stay_exact(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_console.read_model.rows.NAMES_MAX", 20)
    chance = random.Random(draw_seed())
    events: list[Event] = []
    for number in range(60):
        name = f"t{number}"
        key = turn(name).session_key
        source = Reward(time=START, trajectory_id="run", session_key=key, source=f"source-{number}", value=0.5)
        events += [turn(name).model_copy(update={"version": f"m@{number:012x}"}), source]
    await read(database, events, chance)
    assert await counted(database) == accounted(events)
    async with database.transaction() as tx:
        names = {row.id: row.name for row in await tx.execute(select(tables.names))}
        sources = [names[row.source] for row in await tx.execute(select(tables.rewards.c.source))]
        versions = [names[row.version] for row in await tx.execute(select(tables.turns.c.version))]
    assert len(names) < 30
    assert "(other)" in sources
    assert len(versions) == 60
    assert versions.count("(other)") > 40


async def test_frequent_values_take_no_bytes_in_postgres_and_are_read_as_values(database: Database) -> None:
    frequent, rare = turn("a"), turn("b").model_copy(update={"purpose": "eval"})
    await read(database, [frequent, rare], random.Random(1))
    async with database.transaction() as tx:
        values = (await tx.execute(select(tables.turns.c.eval, tables.turns.c.choices))).all()
        stored = (await tx.execute(text("SELECT eval IS NULL, choices IS NULL FROM turns ORDER BY eval IS NULL"))).all()
    assert sorted(values) == [(False, 1), (True, 1)]
    is_postgres = not database.sqlite
    assert [tuple(map(bool, row)) for row in stored] == [(False, is_postgres), (is_postgres, is_postgres)]


async def test_reward_is_stored_once_with_its_highest_revision(database: Database) -> None:
    names = Names()
    for at, (revision, value) in enumerate(((1, 0.25), (0, 0.5), (2, 0.75), (2, 1.0))):
        reward = Reward(
            time=START,
            trajectory_id="run",
            session_key=session_key("default", "s"),
            source="help",
            value=value,
            revision=revision,
        )
        async with database.transaction() as tx:
            await Batch(tx, names, titles=True, day=DAY).apply([LogEvent(reward, 0, at)])
    async with database.transaction() as tx:
        rows = (await tx.execute(select(tables.rewards.c.revision, tables.rewards.c.value))).all()
        hours = await rewards_by_source(tx, 1, 0)
    assert rows == [(2, 0.75)]
    assert sum(hours["help"].outcomes.values()) == 1


async def test_reasons_beyond_the_bound_of_names_share_one_and_counts_stay_exact(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_console.read_model.rows.NAMES_MAX", 10)
    monkeypatch.setattr("headrace_console.read_model.rows._REASONS_MAX", 10)
    events = [turn(f"t{number}", untrained=f"reason-{number}") for number in range(60)]
    await read(database, [*events, trajectory("T", ("t0",), untrained="reason-0")], random.Random(draw_seed()))
    captured, trained, waiting, dropped = await counted(database)
    assert (captured, trained, sum(waiting.values()), sum(dropped.values())) == (60, 0, 0, 60)
    assert dropped["(other)"] > 40
    async with database.transaction() as tx:
        assert len((await tx.execute(select(tables.names))).all()) < 25
    await check_sessions(database)


async def test_record_of_a_tenant_beyond_the_bound_of_names_is_skipped_and_others_are_read(
    database: Database, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in (("NAMES_MAX", 5), ("_REASONS_MAX", 5), ("_IDENTITIES_MAX", 5)):
        monkeypatch.setattr(f"headrace_console.read_model.rows.{name}", limit)
    common = Common.model_validate({"data_dir": data_dir})
    blobs = BlobStore.open(common)
    reader = TopicFollower(
        common.bus, database, blobs, SystemClock(), lambda _topics: None, titles=True, retention_days=30
    )
    records = []
    for number, tenant in enumerate([*(f"tenant-{number}" for number in range(20)), "tenant-0"]):
        key = session_key(tenant, str(number))
        outgoing = await encode(turn(response_id(key), tenant=tenant, session_key=key), "headrace/test", blobs)
        headers = tuple(outgoing.headers)
        records.append(Record(outgoing.topic, 0, number, outgoing.key, outgoing.value, headers))
    await reader.process(records[:20])
    first = (await counted(database))[0]
    assert 0 < first < 15
    await reader.process(records[20:])
    assert (await counted(database))[0] == first + 1
    async with database.transaction() as tx:
        assert len((await tx.execute(select(tables.names))).all()) <= 16
        assert (await tx.execute(select(tables.positions.c.next_offset))).scalar_one() == 21


async def test_turn_belongs_to_the_session_whose_key_is_in_its_id(database: Database) -> None:
    key, other = session_key("default", "a"), session_key("default", "b")
    name, foreign = response_id(key), "6f1d3c1e-9c0e-5d0a-8a55-6865616472ab"
    run = trajectory("T", (name, foreign), session_key=other, session_id="b")
    await read(database, [run, turn(foreign, session_key=other)], random.Random(draw_seed()))
    await read(database, [turn(name, session_key=key)], random.Random(draw_seed()))
    assert await counted(database) == accounted([run, turn(foreign), turn(name)])
    async with database.transaction() as tx:
        for turn_id, owner in ((name, key), (foreign, other)):
            place = await queries.turn_of(tx, EVERYTHING, turn_id)
            assert place is not None
            assert (place[0]["session_key"], unpack_id(place[1]["name"])) == (owner, turn_id)
        assert await queries.turn_of(tx, EVERYTHING, response_id(key)) is None
        assert len((await tx.execute(select(tables.turns))).all()) == 2


async def check_sessions(database: Database) -> None:
    """Check that the summary row of each session equals the sum over its turns."""
    async with database.transaction() as tx:
        names = {row.id: row.name for row in await tx.execute(select(tables.names))}
        turns = (await tx.execute(select(tables.turns))).all()
        sessions = (await tx.execute(select(tables.sessions))).all()
    assert sessions
    for session in sessions:
        states = [names[row.status].partition("/")[0] for row in turns if row.session == session.id and row.status]
        summary = (session.turns, session.trained, session.waiting, session.dropped)
        assert summary == (len(states), *(states.count(kind) for kind in tables.STATUSES))


@pytest.mark.parametrize(
    "fault", ["outcomes are read in the order of arrival", "a refused trajectory keeps its turns", "no difference"]
)
async def test_property_fails_for_a_planted_fault(fault: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "outcomes are read in the order of arrival":
        add = status.add_outcome

        def unordered(row: ExperienceRow, save: tuple[int, int], item: TrainingOutcome, names: Names) -> None:
            add(row, (save[0], 0), item, names)

        monkeypatch.setattr("headrace_console.read_model.events.add_outcome", unordered)
    elif fault == "a refused trajectory keeps its turns":
        monkeypatch.setattr("headrace_console.read_model.events.TURN_ENDING_SOURCES", frozenset())
    else:
        monkeypatch.setattr("collections.Counter.subtract", lambda _self, _other: None)
    differences = 0
    for number in range(3):
        chance = random.Random(draw_seed(str(number)))
        database = Database.open(f"console{number}", Common.model_validate({"data_dir": data_dir}))
        await make_tables(database, "headrace_console")
        events = random_history(chance, 40)
        chance.shuffle(events)
        await read(database, events, chance)
        differences += await counted(database) != accounted(events)
        await database.close()
    assert differences


@pytest.mark.filterwarnings("ignore:autogenerate skipping metadata-specified expression-based index")
@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
async def test_migrations_create_the_schema_of_the_code(database: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        def is_equal_in_both_databases(item: Any, *_: object) -> bool:
            only = getattr(item, "_ddl_if", None)
            return not isinstance(getattr(item, "type", None), tables.OftenEqual) and (
                only is None or only.dialect == connection.dialect.name
            )

        opts = {"version_table": "schema_version", "include_object": is_equal_in_both_databases}
        return list(compare_metadata(MigrationContext.configure(connection, opts=opts), tables.metadata))

    async with database.transaction() as tx:
        assert await tx.run_sync(differences) == []
