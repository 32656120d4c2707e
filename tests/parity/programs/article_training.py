"""The article: training loop, runtime, collection, signals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.blocking import blocking
from headrace.errors import HeadraceError, UsageError
from headrace.rl import (
    DataCollector,
    DPOTrainer,
    HumanPreferenceCollector,
    LLMJudge,
    OnlineTrainer,
    RewardFunction,
    RLRuntime,
    TrinityRFT,
)
from headrace.stack import attach
from headrace_integrations.practice.collecting import record_of
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
