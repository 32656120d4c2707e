"""The article: hot updates, named versions, A/B tests, services apart; and AgentScope Java's wire."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.rl import ABTestFramework, HotUpdater, ModelManager, OnlineTrainer
from headrace.rollouts import Rollouts
from headrace.topics import Range, connected
from headrace_integrations.practice.collecting import run_and_collect
from headrace_runtime.services import installed
from headrace_schemas import TrainingMetrics
from tests.parity.programs.article_training import by_turns, framework
from tests.parity.stage import ChatAgent, Stage, program, raises

_RATIO = {"strategy": "rolling", "canary_ratio": 0.1, "check_after_updates": 1}


def trained(stage: Stage, agent: ChatAgent) -> None:
    """A step, and whatever comes of it."""
    trainer = OnlineTrainer(agent, framework(stage), reward_function=by_turns())
    for number in range(trainer.config.min_samples):
        trainer.add_trajectory(agent.run_and_collect(f"Question {number}?"))  # type: ignore[attr-defined]
    assert trainer.train_step()["trained"] == trainer.config.min_samples


@program("updates")
def updates(stage: Stage) -> None:
    agent, before = ChatAgent(), stage.stack.serving()
    raises(UsageError, "must be rolling or canary", lambda: HotUpdater(agent, {"strategy": "at once"}))
    updater = HotUpdater(agent, _RATIO)
    try:
        assert not updater.has_new_model()
        trained(stage, agent)
        assert updater.has_new_model(), states(stage)
        assert stage.stack.serving() == before, "a paused model waits for the program"
        report = updater.test_canary(["Who?", {"question": "When?", "check": lambda answer: len(answer) >= 0}])
        assert 0.0 <= report["success_rate"] <= 1.0
        assert updater.rollout_update() == stage.stack.serving() != before
        assert updater.rollback() is not None
        blocking(until(lambda: stage.stack.serving() == before))
        trained(stage, agent)
        newest = updater.test_canary([{"question": "What?", "check": "no answer has this"}])
        assert newest["success_rate"] == 0.0
        failed = updater.tested
        assert updater.rollback() == before, "a candidate that failed is withdrawn, and who served serves"
        assert states(stage).count(f"{failed} withdrawn") == 1, "it is not offered again"
    finally:
        updater.close()


@program("versions")
def versions(stage: Stage) -> None:
    manager, agent = ModelManager(), ChatAgent()
    first = manager.create_version("v1.0")
    trained(stage, agent)
    second = manager.create_version("v1.1")
    assert first != second == stage.stack.serving()
    manager.rollback("v1.0")
    blocking(until(lambda: stage.stack.serving() == first))
    test = manager.create_ab_test("v1.0", "v1.1", traffic_ratio={"v1.0": 0.7, "v1.1": 0.3})
    assert test.champion == first
    rollouts = Rollouts(stage.stack.registry)
    blocking(until(lambda: rollouts.newest_of(stage.stack.model, second) is not None))
    begun = rollouts.newest_of(stage.stack.model, second)
    assert begun is not None
    assert begun.share == "3/10"
    rollouts.stop(begun.id)
    raises(UsageError, "at most 1/2", lambda: manager.create_ab_test("v1.0", "v1.1", {"v1.0": 0.2, "v1.1": 0.8}))
    raises(UsageError, "no version 'v9'", lambda: manager.rollback("v9"))


@program("ab")
def ab(stage: Stage) -> None:
    metrics = ["accuracy", "latency", "user_satisfaction"]
    stage.stack.registry.pause(stage.stack.model)
    try:
        test = ABTestFramework(model_a="v1.0", model_b="v1.1", traffic={"a": 0.5, "b": 0.5}, metrics=metrics)
        results: dict[str, Any] = {}
        waiting = threading.Thread(
            target=lambda: results.update(on(stage, lambda: test.run(test_duration_days=30 / 86_400)))
        )
        waiting.start()
        agent = ChatAgent()
        while waiting.is_alive():
            run_and_collect(agent, "Who?", user_feedback={"rating": 4})
        waiting.join()
        assert set(results) == {"a", "b"}
        assert set(results["a"]) == set(metrics)
        arms = [arm for arm in ("a", "b") if results[arm]["accuracy"] is not None]
        assert arms, "sessions were in an arm"
        for arm in arms:
            assert 0.0 <= results[arm]["accuracy"] <= 1.0
            assert results[arm]["latency"] > 0
        winner = "b" if (results["b"]["accuracy"] or 0) > (results["a"]["accuracy"] or 0) + 0.05 else "a"
        assert test.switch_traffic(winner, 1.0) == (test.b if winner == "b" else test.a) == stage.stack.serving()
    finally:
        stage.stack.registry.resume(stage.stack.model)
    # Training went on in the pause; what the old champion answers is stale for it until the newest version serves.
    blocking(until(lambda: stage.stack.registry.versions(stage.stack.model, limit=1)[0].id == stage.stack.serving()))


@program("isolation", own_stack=True)
def isolation(stage: Stage) -> None:
    distributions = installed()
    modules = {distributions[name].module for name in ("gateway", "inference", "collector", "trainer")}
    assert len(modules) == 4, "each is a process of its own, with resources of its own in deploy/"


@program("wire")
def wire(stage: Stage) -> None:
    """Send the requests of the Java client: chat with an offered upgrade, feedback with text ids, a commit of nulls."""
    root = stage.stack.addresses.gateway
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    answers: list[str] = []
    with httpx.Client(base_url=root, timeout=60) as http:
        for task in ("task-1", "task-2"):
            for run in ("0", "1"):
                body = {
                    "model": stage.stack.model,
                    "messages": [{"role": "user", "content": f"{task}?"}],
                    "stream": False,
                }
                headers = {"Authorization": "Bearer dummy", **upgrade}
                answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 6}, headers=headers)
                assert answer.status_code == 200, answer.text
                answers.append(answer.json()["id"])
                feedback = {"msg_ids": [answers[-1]], "reward": float(run == "0"), "task_id": task, "run_id": run}
                assert http.post("/feedback", json=feedback).json() == {"status": "success"}
        nothing = {"task_id": None, "run_id": None, "time_threshold": None}
        assert http.post("/commit", json=nothing).json() == {"status": "success"}
        assert http.post("/feedback", json={"msg_ids": ["unknown"], "reward": 1.0}).status_code == 200
    blocking(until_trained(stage, set(answers)))


def states(stage: Stage) -> str:
    """Return the registry's state of every version."""
    model = stage.stack.registry.model(stage.stack.model)
    versions = stage.stack.registry.versions(stage.stack.model, limit=100)
    return f"{model.champion} serves, paused {model.paused}; " + ", ".join(
        f"{version.id} {version.state}" for version in versions
    )


async def until_trained(stage: Stage, answers: set[str]) -> None:
    left = set(answers)

    async def withdrawn() -> bool:
        async with connected(stage.stack.bus) as topics:
            async for entry in topics.read(Range(TrainingMetrics.topic)):
                if isinstance(entry.event, TrainingMetrics):
                    for outcome in entry.event.verdicts:
                        if outcome.dropped is None:
                            left.difference_update(outcome.turn_ids)
        return not left

    for _ in range(600):
        if await withdrawn():
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"{len(left)} answers were not trained")


async def until(holds: Any, seconds: float = 120.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await asyncio.to_thread(holds):
        assert loop.time() < deadline, "it never came to that"
        await asyncio.sleep(0.2)


def on(stage: Stage, work: Any) -> Any:
    """In a thread that has not entered the stack."""
    from headrace_integrations.stack.connection import ENTERED

    ENTERED.set(stage.stack)
    return work()
