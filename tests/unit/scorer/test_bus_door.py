"""Any record of another producer is taken or dead-lettered by name; the records behind it are handled as before."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import headrace_schemas
from headrace_schemas import DeadLetter, Event, Experience, Trajectory, Turn
from tests.support.hostile_json import mutated
from tests.support.seeds import draw_seed
from tests.support.streams import Bench
from tests.support.trajectories import closed
from tests.support.turns import ask, feedback, user
from tests.unit.collector.conftest import collector, pass_time
from tests.unit.scorer.conftest import half, scorer
from tests.unit.scorer.test_scorer import reward

EXAMPLES = Path(headrace_schemas.__file__).parent / "examples"
RECORDS = 150
NAMED = {
    "invalid_event", "invalid_json", "too_many_values", "too_many_sources", "reserved_source", "unknown_field",
    "foreign_end_reason", "foreign_session_key", "no_branches", "captured_turn", "impossible_time", "turn_taken",
    "too_long", "invalid_trajectory", "unknown_target",
}  # fmt: skip
"""Every reason but `handler_error`, which is a fault of a handler."""


def bodies(topic: str) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((EXAMPLES / topic).glob("*.json"))]


async def nothing() -> None:
    pass


async def flood(
    stream: Bench,
    topic: str,
    chance: random.Random,
    good: Callable[[], Event],
    after: Callable[[], Awaitable[None]] = nothing,
) -> Counter[bool]:
    """Deliver hostile records, each with a good one behind it. Returns how many were taken and refused."""
    valid_bodies = bodies(topic)
    seen: Counter[bool] = Counter()
    for _ in range(RECORDS):
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


@pytest.mark.parametrize("topic", ["turns", "feedback", "session-ends"])
async def test_the_collector_goes_on_behind_any_record(
    database_url: str, data_dir: Path, topic: str, chance: random.Random
) -> None:
    sound_turns: list[Turn] = []

    def good() -> Event:
        sound_turns.append(ask([user("q")], session=f"own-{len(sound_turns)}"))
        return sound_turns[-1]

    async with collector(database_url, data_dir) as stream:
        seen = await flood(stream, topic, chance, good)
        for _ in range(RECORDS // 20):  # a step closes some at a time
            await pass_time(stream, 1000)
        assert {letter.reason for letter in stream.sent(DeadLetter)} <= NAMED
        closed_turns = {name for trajectory in stream.sent(Trajectory) for name in trajectory.turn_ids}
    assert {turn.turn_id for turn in sound_turns} <= closed_turns
    assert min(seen[True], seen[False]) > 5, "some are taken and some are refused"


@pytest.mark.parametrize("topic", ["trajectories", "feedback", "rewards"])
async def test_the_scorer_goes_on_behind_any_record(
    database_url: str, data_dir: Path, topic: str, chance: random.Random
) -> None:
    sound_runs: list[Trajectory] = []

    def good() -> Event:
        sound_runs.append(closed(ask([user("q")], session=f"own-{len(sound_runs)}")))
        return sound_runs[-1]

    async with scorer(database_url, data_dir, half) as rig:
        for body in bodies("trajectories"):  # what the feedback and the rewards of the examples are about
            await rig.stream.deliver(Trajectory.from_json(json.dumps(body).encode()))
        seen = await flood(rig.stream, topic, chance, good, rig.run_functions)
        await rig.deliver(*(feedback(session=run.session_id, value=1.0) for run in sound_runs[:3]))
        await rig.deliver(*(reward(run, "judge:tone", 1.0) for run in sound_runs[:3]))
        for _ in range(RECORDS // 20):
            await rig.pass_time(1000)
        assert {letter.reason for letter in rig.stream.sent(DeadLetter)} <= NAMED
        scored = {
            experience.trajectory_id for experience in rig.stream.sent(Experience) if experience.reward is not None
        }
    assert {run.trajectory_id for run in sound_runs} <= scored
    assert min(seen[True], seen[False]) > 5, "some are taken and some are refused"
