"""Tests of the stream services as processes.

They cover invalid records on every topic, reloaded reward functions, refused settings, and a failed bus. After kill -9,
each turn is in one trajectory, and each trajectory has one experience. A session of 500 calls with 100k tokens of
context survives kill -9 of every service, and is trained as one branch.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import httpx
import pytest

from benchmarks import _sessions_replica
from benchmarks.sessions import Conversation, Stack, end_session, running, wait_for_experiences
from headrace_runtime.kafka.wire import Outgoing
from headrace_schemas import Checkpoint, DeadLetter, Event, Experience, TrainingMetrics, Trajectory, Turn
from headrace_schemas.events.checkpoint import TrainingOutcome
from tests.integration.streams.conftest import StreamsRig, account, episode, play, rig_on
from tests.support import tiny_model
from tests.support.presence import draw_seed
from tests.support.servers import BrokerProcess
from tests.support.service_process import ServiceProcess, wait_healthy

POISON = b'{"poison": '
E = TypeVar("E", bound=Event)


@pytest.mark.timeout(180)
async def test_poison_on_every_topic_costs_nothing_else(tmp_path: Path) -> None:
    seed = draw_seed()
    choose = random.Random(seed)
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    try:
        async with rig_on(broker.address, tmp_path) as rig:
            await rig.start()
            consumed = {
                "collector": ("turns", "feedback", "session-ends"),
                "scorer": ("trajectories", "rewards", "feedback"),
            }
            topics = {topic for names in consumed.values() for topic in names}
            await rig.producer.send_raw(
                [Outgoing(topic, b"poison", POISON, (), partition) for topic in topics for partition in range(4)]
            )
            episodes = [episode(f"{seed}-{n}", choose) for n in range(8)]
            await play(rig, episodes, choose, 0.5)
            await account(rig, episodes)
            letters = Counter((letter.service, letter.source_topic) for letter in await rig.read(DeadLetter))
            assert letters == {(service, topic): 4 for service, names in consumed.items() for topic in names}
            await _reload(rig)
            await _metrics(rig)
    finally:
        broker.stop()


async def _reload(rig: StreamsRig) -> None:
    (scorer,) = rig.processes["scorer"]
    async with httpx.AsyncClient(base_url=scorer.url, timeout=60) as http:
        before = (await http.get("/functions")).json()["functions"]
        (rig.folder / "rewards.py").write_text("def right(trajectory:\n")
        refused = await http.post("/reload")
        assert (refused.status_code, "SyntaxError" in refused.text) == (422, True)
        assert (await http.get("/functions")).json()["functions"] == before
        (rig.folder / "rewards.py").write_text("def right():\n    return 0.5\n")
        assert (await http.post("/reload")).json()["functions"][0]["digest"] != before[0]["digest"]


async def _metrics(rig: StreamsRig) -> None:
    for name, metric in {
        "collector": "headrace_collector_trajectories_total",
        "scorer": "headrace_scorer_experiences_total",
    }.items():
        async with httpx.AsyncClient(base_url=rig.processes[name][0].url) as http:
            text = (await http.get("/metrics")).text
            assert metric in text
            assert 'headrace_dead_letters_total{reason="invalid_json",topic="feedback"} 4.0' in text


def test_a_reward_function_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "rewards.py"
    bad.write_text("def score(weather): ...\n")
    scorer = ServiceProcess("scorer", tmp_path, "127.0.0.1:1", SCORER__FUNCTIONS=[f"{bad}:score"])
    scorer.start(ready=False)
    assert scorer.wait(60) == 2, "settings are wrong: a supervisor need not try again"
    assert "parameter weather; a reward function takes any of trajectory, feedback, context" in scorer.log


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_nothing_is_lost_when_the_bus_is_killed(tmp_path: Path) -> None:
    seed = draw_seed()
    choose = random.Random(seed)
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    try:
        async with rig_on(broker.address, tmp_path) as rig:
            await rig.start()
            supervisor = asyncio.create_task(rig.supervise())
            episodes = [episode(f"{seed}-{n}", choose) for n in range(15)]
            playing = asyncio.create_task(play(rig, episodes, choose, 3.0))
            for _ in range(2):
                await asyncio.sleep(0.5 + choose.random())
                broker.kill()
                await asyncio.sleep(choose.random())
                await asyncio.to_thread(broker.start)
            await playing
            await account(rig, episodes)
            supervisor.cancel()
    finally:
        broker.stop()


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_nothing_is_lost_or_doubled_when_services_are_killed(rig: StreamsRig) -> None:
    seed = draw_seed()
    choose = random.Random(seed)
    episodes = [episode(f"{seed}-{n}", choose, shared=f"{seed}" if n % 5 == 0 else None) for n in range(40)]
    await rig.start()
    playing = asyncio.create_task(play(rig, episodes, choose, 4.0))
    for _ in range(2):
        for name in ("collector", "scorer"):
            await asyncio.sleep(0.3 + choose.random())
            victim = choose.choice(rig.processes[name])
            victim.kill()
            victim.start(ready=False)
    await playing
    await account(rig, episodes)
    assert set(rig.stop()) == {0}, "and they end cleanly when asked to"


TURNS = 500
OPENING_BYTES = 60_000
MESSAGE_BYTES = 56
CONTEXT_TOKENS = 100_000


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_long_session_is_trained_whole_after_each_service_was_killed(tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base", layers=1, heads=1, context=2**17, token_ids=_sessions_replica.VOCABULARY)
    async with running(tmp_path) as stack, aiohttp.ClientSession() as http, _training(stack, base) as trainer:
        kills = {TURNS * (at + 1) // 6: kill for at, kill in enumerate([*_kills(stack), _restart(trainer)])}
        agent = Conversation(stack, http, "coding", OPENING_BYTES, MESSAGE_BYTES)
        for number in range(TURNS):
            if number in kills:
                await asyncio.to_thread(kills[number])
            await agent.call(attempts=60)
        await end_session(stack, http, "coding")
        await wait_for_experiences(stack, ["coding"])
        await asyncio.to_thread(_restart(trainer))
        outcome = await _outcome(stack, trainer)
        (trajectory,) = await stack.events(Trajectory.topic, ["coding"])
        (experience,) = await stack.events(Experience.topic, ["coding"])
        turns: list[Turn] = await stack.events(Turn.topic, ["coding"])
        letters = await stack.view.read(DeadLetter)
    assert letters == []
    (branch,) = trajectory.branches
    assert [span.turn_id for span in branch.spans] == agent.response_ids, "each answer once, in one branch"
    assert {len(span.logprobs) for span in branch.spans} == {_sessions_replica.ANSWER_TOKENS}
    prompt = _sessions_replica.prompt_of(agent.messages[:-1])
    assert list(branch.token_ids) == prompt + _sessions_replica.answer_of(prompt)
    assert len(branch.token_ids) > CONTEXT_TOKENS
    assert experience.branch == branch, "the trainer reads the same tokens"
    assert (outcome.experience_id, outcome.dropped, outcome.left_out) == (experience.experience_id, None, ())
    assert list(outcome.turn_ids) == agent.response_ids, "each turn is trained, once"
    whole_turns = [turn for turn in turns if turn.extends is None]
    assert len(whole_turns) < TURNS / 20, (
        "whole are the first turn, the first one after the gateway's death, and key frames"
    )


def _kills(stack: Stack) -> list[Callable[[], None]]:
    """Return functions that kill a process and start it again on the same data."""

    def gateway() -> None:
        stack.gateway.kill()
        stack.gateway.start()
        wait_healthy(stack.gateway.url)

    def broker() -> None:
        stack.broker.kill()
        stack.broker.start()

    return [_restart(stack.services["collector"]), gateway, broker, _restart(stack.services["scorer"])]


def _restart(service: ServiceProcess) -> Callable[[], None]:
    """Return a function that kills a service and starts it again on the same data."""

    def restart() -> None:
        service.kill()
        service.start(ready=False)

    return restart


@contextlib.asynccontextmanager
async def _training(stack: Stack, base: Path) -> AsyncIterator[ServiceProcess]:
    """Run a trainer, and let the replica serve its version."""
    trainer = ServiceProcess(
        "trainer", stack.folder / "data", stack.broker.address, TRAINER__BASE=str(base), TRAINER__MODEL="tiny",
        TRAINER__BATCH_EXPERIENCES=1, TRAINER__STEPS_PER_VERSION=1, TRAINER__SAVE_INTERVAL_S=1.0,
        TRAINER__MEMORY__SEQUENCE_TOKENS=2**17, TRAINER__NATIVE__TOKENS=512, TRAINER__HEALTH__MISMATCH_MAX=0.0,
    )  # fmt: skip
    trainer.begin()
    try:
        (checkpoint,) = await _events(stack, Checkpoint, trainer)
        await stack.serve(checkpoint.version, revision=2)
        yield trainer
    finally:
        trainer.stop()


async def _outcome(stack: Stack, trainer: ServiceProcess) -> TrainingOutcome:
    """Wait for the only outcome of training, and return it."""
    while True:
        accounts = await _events(stack, TrainingMetrics, trainer)
        outcomes = [outcome for account in accounts for outcome in account.verdicts]
        if outcomes:
            (outcome,) = outcomes
            return outcome
        await asyncio.sleep(5)


async def _events(stack: Stack, kind: type[E], trainer: ServiceProcess) -> list[E]:
    """Wait for events of class `kind` on the topic, and return them."""
    while True:
        assert trainer.running(), trainer.log[-3000:]
        if events := await stack.view.read(kind):
            return events
        await asyncio.sleep(0.5)
