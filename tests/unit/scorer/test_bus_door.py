"""Tests of records from other producers, of the ownership of turns, and of the scorer's REST routes and settings.

Any record is accepted or dead-lettered with a reason, and later records are handled. A turn belongs to one trajectory
of its tenant. Ingested trajectories are checked.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from sqlalchemy import event

from headrace_runtime.errors import SettingError
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, load
from headrace_schemas import DeadLetter, Event, Experience, Trajectory, Turn
from headrace_scorer import api
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.settings import ScorerSettings
from tests.support.hostile_json import event_examples, mutated
from tests.support.presence import draw_seed
from tests.support.streams import Bench
from tests.support.turns import ask, closed, feedback, user
from tests.unit.collector.conftest import collector, pass_time
from tests.unit.scorer.conftest import Rig, half, scorer
from tests.unit.scorer.test_scorer import reward

each_number = pytest.mark.parametrize("records", [50, pytest.param(150, marks=pytest.mark.long)])
"""Number of hostile records on the topic."""
NAMED = {
    "invalid_event", "invalid_json", "too_many_values", "too_many_sources", "reserved_source", "unknown_field",
    "foreign_end_reason", "foreign_session_key", "no_branches", "captured_turn", "impossible_time", "turn_taken",
    "too_long", "invalid_trajectory", "unknown_target", "unresolved_turn",
}  # fmt: skip
"""Every reason but `handler_error`, which is a fault of a handler."""


def bodies(topic: str) -> list[dict[str, object]]:
    return list(event_examples(topic).values())


async def nothing() -> None:
    pass


async def flood(
    stream: Bench,
    topic: str,
    chance: random.Random,
    records: int,
    good: Callable[[], Event],
    after: Callable[[], Awaitable[None]] = nothing,
) -> Counter[bool]:
    """Deliver hostile records, each followed by a valid one. Return the number of accepted (True) and refused
    (False) ones."""
    valid_bodies = bodies(topic)
    seen: Counter[bool] = Counter()
    for _ in range(records):
        value = json.dumps(mutated(chance.choice(valid_bodies), chance)).encode()
        before = len(stream.sent(DeadLetter))
        await stream.deliver(stream.append(topic, value), *stream.produce(good()))
        await after()
        letters = stream.sent(DeadLetter)[before:]
        assert {letter.reason for letter in letters} <= NAMED, (value[:3000], letters)
        seen[bool(letters)] += 1
    return seen


@pytest.fixture
def chance() -> random.Random:
    return random.Random(draw_seed())


@each_number
@pytest.mark.parametrize("topic", ["turns", "feedback", "session-ends"])
async def test_the_collector_goes_on_behind_any_record(
    database_url: str, data_dir: Path, topic: str, chance: random.Random, records: int
) -> None:
    sound_turns: list[Turn] = []

    def good() -> Event:
        sound_turns.append(ask([user("q")], session=f"own-{len(sound_turns)}"))
        return sound_turns[-1]

    async with collector(database_url, data_dir) as stream:
        seen = await flood(stream, topic, chance, records, good)
        for _ in range(max(records // 20, 5)):  # a step closes some at a time
            await pass_time(stream, 1000)
        assert {letter.reason for letter in stream.sent(DeadLetter)} <= NAMED
        closed_turns = {name for trajectory in stream.sent(Trajectory) for name in trajectory.turn_ids}
    assert {turn.turn_id for turn in sound_turns} <= closed_turns
    assert min(seen[True], seen[False]) >= records // 30, "some are accepted and some are refused"


@each_number
@pytest.mark.parametrize("topic", ["trajectories", "feedback", "rewards"])
async def test_the_scorer_goes_on_behind_any_record(
    database_url: str, data_dir: Path, topic: str, chance: random.Random, records: int
) -> None:
    sound_runs: list[Trajectory] = []

    def good() -> Event:
        sound_runs.append(closed(ask([user("q")], session=f"own-{len(sound_runs)}")))
        return sound_runs[-1]

    async with scorer(database_url, data_dir, half) as rig:
        for body in bodies("trajectories"):  # what the feedback and the rewards of the examples are about
            await rig.stream.deliver(Trajectory.from_json(json.dumps(body).encode()))
        seen = await flood(rig.stream, topic, chance, records, good, rig.run_functions)
        await rig.deliver(*(feedback(session=run.session_id, value=1.0) for run in sound_runs[:3]))
        await rig.deliver(*(reward(run, "judge:tone", 1.0) for run in sound_runs[:3]))
        for _ in range(max(records // 20, 5)):
            await rig.pass_time(1000)
        assert {letter.reason for letter in rig.stream.sent(DeadLetter)} <= NAMED
        scored = {
            experience.trajectory_id for experience in rig.stream.sent(Experience) if experience.reward is not None
        }
    assert {run.trajectory_id for run in sound_runs} <= scored
    assert min(seen[True], seen[False]) >= records // 30, "some are accepted and some are refused"


async def test_a_turn_is_in_one_trajectory_only(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir) as rig:
        turn = ask([user("q")])
        first = closed(turn)
        await rig.deliver(first)
        await rig.deliver(*(closed(turn, trajectory_id=f"again-{n}") for n in range(3)), first)
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["turn_taken"] * 3
        assert await rig.stream.count("trajectories") == 1
        assert await rig.stream.count("turn_owners") == 1


async def test_another_tenants_turn_of_the_same_id_is_its_own(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir) as rig:
        turn = ask([user("q")], turn_id="mine-1")
        await rig.deliver(closed(turn, trajectory_id="a"), closed(turn, trajectory_id="b", tenant="other"))
        assert rig.stream.sent(DeadLetter) == []


async def test_what_a_stranger_sends_is_checked(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir) as rig:
        record = rig.stream.append("trajectories", closed(ask([user("q")])).to_json())
        await rig.stream.deliver(record)
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["foreign_end_reason"]


async def test_a_trajectory_of_thousands_of_turns_takes_few_statements(database_url: str, data_dir: Path) -> None:
    """A single large run of one caller must not block the scorer and its database for other callers."""
    turn = ask([user("q")])
    branch = closed(turn).branches[0]
    span = branch.spans[0]
    spans = [span.model_copy(update={"start": at, "logprobs": (-0.5,), "turn_id": f"t{at}"}) for at in range(4000)]
    large = branch.model_copy(update={"token_ids": (1,) * 4000, "spans": tuple(spans)})
    statements: list[str] = []
    async with scorer(database_url, data_dir) as rig:
        await rig.deliver(closed(turn, trajectory_id="first"))
        engine = rig.stream.processor.database.engine.sync_engine

        @event.listens_for(engine, "before_cursor_execute")
        def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            statements.append(statement)

        await rig.deliver(closed(turn, trajectory_id="many", branches=(large,)))
        assert await rig.stream.count("turn_owners") == 4001
        assert len(statements) < 200
        statements.clear()
        overlapping = large.model_copy(update={"spans": (*spans[1:], spans[0].model_copy(update={"start": 4000}))})
        again = overlapping.model_copy(update={"token_ids": (1,) * 4001})
        await rig.deliver(closed(turn, trajectory_id="again", branches=(again,)))
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["turn_taken"]
        assert len(statements) < 200


COMMON = Common.model_validate({"security": {"internal_key": "key"}})


@pytest.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    async with scorer("sqlite", data_dir, half) as opened:
        yield opened


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[FunctionPool]:
    (tmp_path / "r.py").write_text("def score():\n    return 1.0\n")
    created = FunctionPool(ScorerSettings(functions=(f"{tmp_path}/r.py:score",)))
    await created.reload()
    yield created
    await created.close()


def client(pool: FunctionPool, rig: Rig, key: str = "key") -> httpx.AsyncClient:
    application = web.app({}, api.routes(COMMON, pool, rig.stream.processor.database))
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://scorer", headers=headers)


async def test_functions_are_listed_and_reloaded_or_left_as_they_were(
    rig: Rig, pool: FunctionPool, tmp_path: Path
) -> None:
    async with client(pool, rig) as http:
        before = (await http.get("/functions")).json()["functions"]
        assert [(function["name"], function["parameters"]) for function in before] == [("score", [])]
        (tmp_path / "r.py").write_text("def score(context):\n    return 0.5\n")
        after = (await http.post("/reload")).json()["functions"]
        assert after[0]["parameters"] == ["context"]
        assert after[0]["digest"] != before[0]["digest"]
        (tmp_path / "r.py").write_text("def score(weather):\n    return 0.5\n")
        refused = await http.post("/reload")
        assert refused.status_code == 422
        assert "parameter weather" in refused.json()["error"]["message"]
        assert (await http.get("/functions")).json()["functions"] == after


async def test_the_ledger_shows_every_revision(rig: Rig, pool: FunctionPool) -> None:
    trajectory = closed()
    await rig.deliver(trajectory)
    async with client(pool, rig) as http:
        rewards = (await http.get(f"/ledger/{trajectory.trajectory_id}")).json()["rewards"]
        assert [(row["source"], row["revision"], row["value"]) for row in rewards] == [("function:half", 0, 0.5)]
        assert rewards[0]["time"].startswith("2026-01-01T00:00:00")
        assert (await http.get("/ledger/unknown")).status_code == 404


async def test_the_pages_need_the_internal_key(rig: Rig, pool: FunctionPool) -> None:
    async with client(pool, rig, "wrong") as http:
        for page in (http.get("/functions"), http.post("/reload"), http.get("/ledger/x")):
            assert (await page).status_code == 401


def test_a_required_source_without_a_weight_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[scorer]\nrequired = ["feedback"]\n[scorer.weights]\n"judge:*" = 1.0\n')
    with pytest.raises(SettingError, match="required source 'feedback' has no weight"):
        load("scorer", ScorerSettings, path, {})


@pytest.mark.parametrize("weights", ['"*" = -1.0', '"*" = inf', ""])
def test_weights_are_finite_and_not_negative(tmp_path: Path, weights: str) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(f"[scorer.weights]\n{weights}\n")
    with pytest.raises(SettingError, match=r"scorer\.weights"):
        load("scorer", ScorerSettings, path, {})
