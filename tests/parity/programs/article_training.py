"""The article: training loop, runtime, collection, signals.

The article: hot updates, named versions, A/B tests, services apart; and AgentScope Java's wire.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from headrace.blocking import blocking
from headrace.errors import HeadraceError, UsageError
from headrace.rl import (
    ABTestFramework,
    DataCollector,
    DPOTrainer,
    HotUpdater,
    HumanPreferenceCollector,
    LLMJudge,
    ModelManager,
    OnlineTrainer,
    RewardFunction,
    RLRuntime,
    TrinityRFT,
)
from headrace.rollouts import Rollouts
from headrace.stack import attach
from headrace.topics import Range, connected
from headrace_integrations.practice.collecting import record_of, run_and_collect
from headrace_runtime.services import installed_services
from headrace_schemas import TrainingMetrics
from headrace_trainer.algorithms.presets import ALGORITHMS
from tests.parity.stage import (
    LIVE,
    SMALL,
    AsyncAgent,
    ChatAgent,
    Stage,
    hand_made_trajectory,
    program,
    raises,
    the_record,
)
from tests.support.fake_llm import FakeLLM, abstain, prose, verdict
from tests.support.processes import wait_until


def framework(stage: Stage) -> TrinityRFT:
    """Return a trainer as the article builds it, on the shared stack: 2 times 2 runs are a step."""
    return TrinityRFT(
        algorithm=str(LIVE["trainer.algorithm"]),
        model_config={"base_model": str(stage.base)},
        training_config={"learning_rate": 1e-3, "batch_size": 2, "gradient_accumulation_steps": 2},
    )


def by_turns() -> Callable[[dict[str, Any]], dict[str, float]]:
    """Something to learn from: rewards in parts, better for every second run."""
    turns = itertools.cycle((0.0, 1.0))
    return lambda _record: {"task_completion": next(turns), "efficiency": 0.5}


@program("imports", own_stack=True)
def imports(stage: Stage) -> None:
    import headrace.rl

    for name in headrace.rl.__all__:
        assert getattr(headrace.rl, name) is not None
    raises(UsageError, "must be a model folder", lambda: attach(base="Qwen/Qwen3-0.6B-Instruct"))
    raises(UsageError, "no_such: has no effect here", lambda: TrinityRFT("ppo", {"no_such": 1}))


@program("loop")
def loop(stage: Stage) -> None:
    agent = ChatAgent()
    trainer = OnlineTrainer(agent, framework(stage), reward_function=by_turns())
    assert trainer.config.min_samples == 4
    before = stage.stack.serving()
    trained = 0.0
    while not trained:
        trajectory = agent.run_and_collect("What is the report about?")  # type: ignore[attr-defined]
        trainer.add_trajectory(trajectory)
        if len(trainer.buffer) >= trainer.config.min_samples:
            trained = trainer.train_step()["trained"]
    assert trained == 4
    assert trainer.should_update()
    assert trainer.update_agent_model() == stage.stack.serving() != before
    assert not trainer.should_update()
    assert agent.model == "some-model", "the agent's own settings are back"


@program("runtime", own_stack=True)
def runtime(stage: Stage) -> None:
    checkpoints = stage.folder / "checkpoints"
    agent = AsyncAgent()
    config = {"algorithm": LIVE["trainer.algorithm"], "train_interval": 2, "update_interval": 1}
    runtime_settings = {
        "checkpoint_dir": str(checkpoints),
        "model_config": {"base_model": str(stage.base)},
        "settings": SMALL,
    }
    started = RLRuntime(agent, {**config, **runtime_settings, "reward_function": by_turns()}).start()
    try:
        assert started.trainer is not None
        before = started.trainer.version
        for _ in range(2):
            assert isinstance(blocking(agent.run("Say something.")), str)
        wait_until(started.trainer.should_update, 240.0, "a version of two runs")
        assert started.trainer.update_agent_model() != before
    finally:
        started.stop()
    assert Path(checkpoints).is_dir()


@program("collection")
def collection(stage: Stage) -> None:
    fields = {"messages": True, "thoughts": True, "tool_calls": True, "rewards": True, "user_feedback": True}
    collector = DataCollector(collect_fields=fields, reward_function=lambda _record: {"task_completion": 0.8})
    collected = collector.collect(ChatAgent(), "Find the invoice.", {"rating": 4, "comment": "good"})
    assert list(collected) == ["conversation_id", "messages", "thoughts", "tool_calls", "rewards", "total_reward"]
    assert collected["rewards"] == {"task_completion": 0.8, "user_satisfaction": 0.8}
    assert collected["total_reward"] == 1.6
    assert [message["role"] for message in collected["messages"]] == ["user", "assistant"]
    json.dumps(collected)
    unrewarded = DataCollector({"rewards": False, "thoughts": False}).collect(ChatAgent(), "Again.")
    assert {"rewards", "thoughts"}.isdisjoint(unrewarded)
    assert unrewarded["total_reward"] is None, "nobody said anything, and that is no 0"
    raises(UsageError, "collect_fields.mood: has no effect here", lambda: DataCollector({"mood": True}))


@program("records", own_stack=True)
def records(stage: Stage) -> None:
    assert record_of(hand_made_trajectory()) == the_record()


@program("algorithms", own_stack=True)
def algorithms(stage: Stage) -> None:
    installed = set(ALGORITHMS.names())
    expected = {"ppo", "dpo", "rft", "sft", "grpo", "multi_step_grpo", "on_policy_distill", "reinforce++"}
    assert expected <= installed, f"the trainer has no {', '.join(sorted(expected - installed))}"
    for name in ("ppo", "dpo", "rft"):
        assert TrinityRFT(name, {"base_model": "models/base"}).settings["trainer.algorithm"] == name


class Article(RewardFunction):
    """The article's own example."""

    def compute(self, trajectory: Any) -> float:
        completion_score = self.check_completion(trajectory)["score"]
        efficiency = 1.0 / (len(trajectory["tool_calls"]) + 1)
        return 2.0 * completion_score + 1.0 * efficiency + 1.5 * self.check_accuracy(trajectory)


@program("signals", own_stack=True)
def signals(stage: Stage) -> None:
    record = {**the_record(), "expected": "Ada"}
    assert Article()(record) == 2.0 + 0.5 + 1.5
    raises(ValueError, "no `expected`", lambda: Article()(the_record()))
    criteria = {"relevance": "Is it to the point?", "accuracy": "Is it right?", "completeness": "Is all of it there?"}
    with FakeLLM(verdict("fine", relevance=5, accuracy=4, completeness=3)) as llm:
        judge = LLMJudge(model="gpt-4", criteria=criteria, base_url=llm.base_url)
        scores = judge.evaluate("Who wrote?", "Ada wrote.")
        assert scores == {"relevance": 5.0, "accuracy": 4.0, "completeness": 3.0, "total": 4.0}
        assert scores["total"] / 5.0 == 0.8
        llm.then(prose(), prose())
        raises(HeadraceError, "is no verdict", lambda: judge.evaluate("Who wrote?", "Ada wrote."))
        llm.then(abstain())
        raises(HeadraceError, "abstained", lambda: judge.evaluate("Who wrote?", ""))


@program("preferences")
def preferences(stage: Stage) -> None:
    agent = ChatAgent()
    trainer = OnlineTrainer(agent, framework(stage))
    questions: list[str] = []

    def prefer(question: str, _a: str, _b: str) -> str | None:
        questions.append(question)
        return "a" if len(questions) < 3 else None

    collector, dpo = HumanPreferenceCollector(ask=prefer), DPOTrainer()
    for question in ("Who?", "When?"):
        agent.run_and_collect(question)  # type: ignore[attr-defined]
        dpo.add_preference(collector.collect(question, f"{question} Ada, at ten.", f"{question} I do not know."))
    dpo.add_preference(collector.collect("Neither?", "x", "y"))
    assert len(dpo.preferences) == 2
    assert dpo.preferences[0]["chosen"] == "Who? Ada, at ten."
    version = dpo.train()
    assert version.startswith(f"{trainer.stack.model}@")
    if stage.stack.serving() == version:
        trainer = OnlineTrainer(agent, framework(stage), reward_function=by_turns())
        trainer.add_trajectory(agent.run_and_collect("Who?"))  # type: ignore[attr-defined]
        raises(UsageError, "does not belong to this trainer's lineage", trainer.train_step)
        stage.back_to_training(version)


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
    distributions = installed_services()
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
