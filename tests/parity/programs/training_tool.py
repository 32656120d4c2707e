"""HelloAgents (tool, rewards, pipeline, files of accelerate, export), and the three agents of the article."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.hello_agents import AgenticRLPipeline, RLTrainingTool, check_rows, create_reward
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
from headrace_integrations.hello_agents.rewards import accuracy
from headrace_integrations.scenarios.maths import measured
from headrace_integrations.scenarios.tool_use import pairs
from headrace_operations.accelerate_yaml import settings_of_accelerate
from tests.parity.programs.article_training import framework
from tests.parity.stage import LIVE, SMALL, ChatAgent, Stage, program, raises, the_record
from tests.support.packages import trained_runs

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in (1, 2, 3)]
DDP = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 4, "machine_rank": 0,
    "num_machines": 1, "gpu_ids": "all", "mixed_precision": "fp16",
}  # fmt: skip
ZERO = {
    **DDP,
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "offload_optimizer_device": "none",
        "offload_param_device": "none", "zero3_init_flag": False, "zero_stage": 2,
    },
}  # fmt: skip


def near(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward of one's own, by the document's rules."""
    scores = []
    for completion, truth in zip(completions, kwargs.get("ground_truth", []), strict=False):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
        if not numbers:
            scores.append(0.0)
            continue
        away = abs(float(numbers[-1]) - float(truth))
        base = 1.0 if away < 0.01 else 0.8 if away < 1.0 else 0.5 if away < 5.0 else 0.0
        scores.append(min(1.0, base + (0.1 if "step" in completion.lower() or "=" in completion else 0.0)))
    return scores


@program("rewards", own_stack=True)
def rewards(stage: Stage) -> None:
    truth = {"ground_truth": ["4", "4", "x"]}
    assert accuracy(["it is 4", "it is 5", "x"], **truth) == [1.0, 0.0, 1.0]
    assert create_reward("accuracy")(["4.00005"], ground_truth=["4"]) == [1.0], "a tolerance of 1e-4"
    penalised = create_reward("length_penalty", max_length=3, penalty_weight=0.5)(["4    4"], ground_truth=["4"])
    assert penalised == [1.0 - 0.5 * 3]
    assert create_reward("step", step_bonus=0.1)(["a\nb\n4"], ground_truth=["4"]) == [1.2]
    assert near(["step 1: = 4"], ground_truth=["4"]) == [1.0]
    assert near(["step 1: = 9"], ground_truth=["4"]) == [0.1], "the bonus is paid for a wrong number, too"
    assert near(["4"]) == []
    tool = RLTrainingTool()
    tool.register_dataset("sums", ROWS)
    tool.register_reward_function("sums", near)
    result = json.loads(tool.run({"action": "create_reward", "reward_type": "step", "step_bonus": 0.1}))
    assert (result["status"], result["reward_type"], result["step_bonus"]) == ("success", "step", 0.1)
    for form, keys in (
        ("sft", ["prompt", "completion", "text"]),
        ("rl", ["prompt", "ground_truth", "question", "full_answer"]),
    ):
        loaded = json.loads(tool.run({"action": "load_dataset", "dataset": "sums", "format": form, "max_samples": 2}))
        assert (loaded["dataset_size"], loaded["sample_keys"]) == (2, keys)
    assert json.loads(tool.run({"action": "fly"}))["status"] == "error"
    raises(UsageError, "row 2: duplicates row 1", lambda: check_rows([ROWS[0], ROWS[0]]))
    raises(UsageError, "answer is empty", lambda: check_rows([{"question": "?", "answer": " "}]))


@program("tool", own_stack=True)
def tool(stage: Stage) -> None:
    with stage.working_folder("tool"):
        tool = RLTrainingTool(settings=SMALL)
        tool.register_dataset("sums", ROWS)
        tool.register_reward_function("sums", near)
        common = {"dataset": "sums", "use_lora": True, "num_epochs": 1, "batch_size": 2}
        sft = run_tool(tool, {
            **common, "action": "train", "algorithm": "sft", "model_name": str(stage.base), "max_samples": 2,
            "output_dir": "./models/quick_test_sft",
        })  # fmt: skip
        assert (sft["algorithm"], sft["dataset_size"]) == ("SFT", 2)
        same_as_peft(stage.base, Path(sft["output_dir"]))
        grpo = run_tool(tool, {
            **common, "action": "train", "algorithm": "grpo", "model_name": sft["output_dir"], "max_samples": 2,
            "output_dir": "./models/quick_test_grpo",
        })  # fmt: skip
        assert grpo["algorithm"] == "GRPO"
        result = run_tool(
            tool,
            {
                "action": "evaluate",
                "model_path": grpo["output_dir"],
                "dataset": "sums",
                "max_samples": 2,
                "use_lora": True,
            },
        )
        assert result["num_samples"] == 2
        assert result["accuracy"].endswith("%")
        assert 0.0 <= float(result["average_reward"]) <= 1.0


@program("pipeline", own_stack=True)
def pipeline(stage: Stage) -> None:
    """Check the order and the parameters; the program `tool` shows each action."""

    class Noting(RLTrainingTool):
        """Answers at once."""

        def __init__(self) -> None:
            super().__init__()
            self.run_tool: list[dict[str, Any]] = []

        def run(self, parameters: Any) -> str:
            self.run_tool.append(dict(parameters))
            return json.dumps({"status": "success", "output_dir": parameters.get("output_dir"), "accuracy": "50.00%"})

    with stage.working_folder("pipeline") as folder:
        config = folder / "config.json"
        training = {"num_epochs": 1, "batch_size": 2}
        sft, grpo = {"output_dir": "./models/sft", **training}, {"output_dir": "./models/grpo", **training}
        config.write_text(
            json.dumps({"model": {"base_model": "base"}, "sft": sft, "grpo": grpo, "eval": {"max_samples": 3}})
        )
        noting = Noting()
        pipeline_under_test = AgenticRLPipeline(str(config), rl_tool=noting)
        pipeline_under_test.run()
    trained = [call for call in noting.run_tool if call["action"] == "train"]
    assert [(call["algorithm"], call["model_name"]) for call in trained] == [("sft", "base"), ("grpo", "./models/sft")]
    assert all(call["use_lora"] for call in trained)
    evaluated = [call["model_path"] for call in noting.run_tool if call["action"] == "evaluate"]
    assert evaluated == ["./models/sft", "./models/grpo"]
    assert set(pipeline_under_test.results) >= {"sft_training", "sft_evaluation", "grpo_training", "grpo_evaluation"}


@program("accelerate", own_stack=True)
def accelerate(stage: Stage) -> None:
    ranks = {"trainer.backend": "ray", "trainer.ray.ranks": 4, "trainer.compute.dtype": "auto"}
    assert settings_of_accelerate(DDP) == ranks
    sharded = {**ranks, "trainer.optimizer.gradient_norm_max": 1.0, "trainer.ray.shard": "full"}
    assert settings_of_accelerate(ZERO) == sharded
    raises(UsageError, "num_machines = 2", lambda: settings_of_accelerate({**DDP, "num_machines": 2}))
    inner = {"deepspeed_config": {"offload_param_device": "cpu"}}
    raises(UsageError, "offload_param_device = 'cpu'", lambda: settings_of_accelerate({**ZERO, **inner}))


def run_tool(tool: RLTrainingTool, parameters: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(tool.run(parameters))
    assert result["status"] == "success", result.get("traceback")
    return result


def same_as_peft(base: Path, folder: Path) -> None:
    """The adapter merged by PEFT, and the model that was written merged, answer alike."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged_by_peft = PeftModel.from_pretrained(loaded, str(folder)).merge_and_unload()
    merged_here = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    tokens = torch.arange(9, 41)[None]
    with torch.no_grad():
        apart = (merged_by_peft(tokens).logits - merged_here(tokens).logits).abs().max().item()
    assert apart < 1e-4, f"merged by PEFT and by us differ by {apart}"


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
