"""The article's three agents.

AgentScope Java's training extension as Python agents have it: replayed calls of copies, and their training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.rl import (
    GameTrainer,
    MathAgentTrainer,
    MultiAgentGame,
    ToolUseEvaluator,
    ToolUseTrainer,
    evaluate_win_rate,
)
from headrace.shadow import (
    ExplicitMarkingStrategy,
    HeadraceSink,
    SamplingRateStrategy,
    SelectionStrategy,
    TrainingCopy,
    TrainingRunner,
    TrajectorySink,
    TrinitySink,
    mark,
    read_only,
)
from headrace_integrations.scenarios.maths import measured
from headrace_integrations.scenarios.tool_use import pairs
from tests.parity.programs.article_training import framework
from tests.parity.stage import LIVE, ChatAgent, Stage, program, raises, the_record
from tests.support.java_agent import trained_runs

SOLVED = "Thought: expand it.\nStep 1: x^2 + 2x - 15 = 0\nStep 2: (x + 5)(x - 3) = 0\nAnswer: 3"


@program("maths")
def maths(stage: Stage) -> None:
    trainer = MathAgentTrainer(
        algorithm=str(LIVE["trainer.algorithm"]),
        model_config={"base_model": str(stage.base)},
        reward_function={"correctness": 3.0, "steps_penalty": -0.1, "format_bonus": 0.5},
        training_config={"learning_rate": 1e-3, "batch_size": 4, "epochs": 1},
    )
    assert trainer.parts(SOLVED, "3") == {"correctness": 3.0, "steps_penalty": -0.2, "format_bonus": 0.5}
    assert trainer.parts("x is 3", "3") == {"correctness": 0.0, "steps_penalty": 0.0, "format_bonus": 0.0}
    assert measured(SOLVED, "3.0") == {"accuracy": 1.0, "steps": 2.0, "format": 1.0}
    problems = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]
    agent = ChatAgent(lambda question, answer: SOLVED if question.startswith("1") else f"{answer}\nAnswer: 5")
    steps = trainer.train(agent, problems, group_size=2)
    assert [step.trained for step in steps] == [4]
    assert steps[0].run_metrics["format"] == 0.5
    raises(
        UsageError,
        "reward_function.elegance: has no effect here",
        lambda: MathAgentTrainer("ppo", None, {"elegance": 1.0}),
    )


@program("tools")
def tools(stage: Stage) -> None:
    worth = {"correct_tool": 1.0, "correct_args": 0.5, "tool_success": 1.0, "invalid_tool": -2.0}
    expected_call = {"tool": "search", "args": {"query": "invoice"}}
    trainer = ToolUseTrainer(
        "dpo", {"base_model": str(stage.base)}, worth, tools=["search"], expected=lambda _: expected_call
    )
    good, bad = the_record(), {**the_record(), "tool_calls": [{"tool": "delete", "args": {}, "result": "gone"}]}
    assert sum(trainer.parts(good).values()) == 2.5
    assert sum(trainer.parts(bad).values()) == -2.0
    preference_pairs = pairs([{**good, "total_reward": 2.5}, {**bad, "total_reward": -2.0}])
    assert len(preference_pairs) == 1
    raises(UsageError, "no two runs", lambda: pairs([{**good, "total_reward": 2.5}]))
    agent = ChatAgent()
    trainer.connect(agent)
    agents_own = trainer.parts
    rewards = iter([2.0, -2.0])
    trainer.parts = lambda record: {**agents_own(record), "correct_tool": next(rewards)}  # type: ignore[method-assign]
    for email in ({"subject": "invoice"}, {"subject": "invoice"}):
        trainer.add_trajectory(agent.run_and_collect(f"search: {email['subject']}"))  # type: ignore[attr-defined]
    assert trainer.train() == stage.stack.serving()
    cases = [{"input": "search: invoice", "tool": "search", "args": {}}]
    assert ToolUseEvaluator().evaluate(agent, cases) == {"tool_accuracy": 0.0, "arg_accuracy": 0.0}
    stage.back_to_training(str(stage.stack.serving()))


@program("games")
def games(stage: Stage) -> None:
    def wolf(text: str, _answer: str) -> str:
        return "villager_1" if "victim" in text or "Vote" in text else "I am a villager."

    def villager(text: str, _answer: str) -> str:
        return "villager_2" if "Vote" in text else "hm"

    names = {"werewolf_1": wolf, "villager_1": villager, "villager_2": villager, "villager_3": villager}
    agents = {name: ChatAgent(reply) for name, reply in names.items()}
    game = MultiAgentGame(roles={"werewolf": 1, "villager": 3}, agents=agents)
    result = game.run_episode()
    assert result["winner"] == "werewolf"
    trainer = GameTrainer(
        [agents["werewolf_1"]],
        {"team_win": 10.0, "individual_survive": 5.0, "successfully_blame": 2.0, "exposed_penalty": -5.0},
        framework(stage),
    )
    for agent in result["agents"]:
        trainer.add_trajectory(agent.get_trajectory())
    wolves = result["agents"][0].get_trajectory()
    assert wolves["events"]["team_win"] == wolves["events"]["individual_survive"] == 1
    assert len(trainer.trainer.buffer) == len(wolves["records"]), "villagers' records are passed over"
    assert trainer.trainer.buffer[0]["total_reward"] >= 15.0
    assert trainer.train()["trained"] > 0
    assert evaluate_win_rate([agents["werewolf_1"]], episodes=1) == 100.0
    raises(UsageError, "as werewolf_1", lambda: MultiAgentGame({"werewolf": 2}, {"werewolf_1": object()}))


_TRAINED_S = 60.0


@read_only
def look_up(order: str) -> str:
    return f"{order} is on its way"


def cancel(order: str) -> str:
    raise AssertionError(f"a copy cancelled {order}")


def make_agent(copy: TrainingCopy) -> Callable[[str], str]:
    """Look the order up, ask the model, and cancel the order on request."""
    client, tools = copy.openai(blocking=True), copy.tools({"look_up": look_up, "cancel": cancel})

    def ask(text: str) -> str:
        tools["cancel" if "cancel" in text else "look_up"](text)
        messages: Any = [{"role": "user", "content": text}]
        completion = client.chat.completions.create(model=copy.model, messages=messages, max_tokens=6)
        return completion.choices[0].message.content or ""

    return ask


def run_requests(
    sink: TrajectorySink, selection: SelectionStrategy, repeat: int, requests: dict[str, str | None]
) -> TrainingRunner:
    """Play users, some of them in a marked task. A production model outside the stack answers them."""
    runner = TrainingRunner(sink, make_agent, lambda copy: len(copy.answer) / 10, selection=selection, repeat=repeat)
    with runner:
        ask = runner.watched(lambda text: f"served {text}")
        for text, task in requests.items():
            if task is None:
                assert ask(text) == f"served {text}"
            else:
                with mark("user-feedback", task_id=task):
                    assert ask(text) == f"served {text}"
    return runner


@program("copies")
def copies(stage: Stage) -> None:
    stack, everything = stage.stack, SamplingRateStrategy(1.0)
    sampled = {f"order {number}?": f"sampled-{number}" for number in range(2)}
    runner = run_requests(HeadraceSink(stack), everything, 4, {**sampled, "cancel order 2": "written"})
    assert (runner.counts.rewarded, runner.counts.refused) == (8, 4), runner.last_error
    marks = {"order 3?": "marked-3", "order 4?": None}
    assert run_requests(HeadraceSink(stack), ExplicitMarkingStrategy("user-feedback"), 1, marks).counts.selected == 1
    run_requests(TrinitySink(stack), everything, 2, {"order 5?": "trinity-5"})
    expected = {"sampled-0": 4, "sampled-1": 4, "marked-3": 1, "trinity-5": 2}
    deadline = time.monotonic() + _TRAINED_S
    while True:
        runs = blocking(trained_runs(stack.bus))
        counts = {task: len(runs.get(task, {})) for task in expected}
        if counts == expected:
            break
        assert time.monotonic() < deadline, f"{counts} in place of {expected}"
        time.sleep(0.3)
    assert sorted(runs["trinity-5"]) == ["0", "1"]
    assert "written" not in runs
