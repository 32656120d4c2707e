"""Tests that every argument of HelloAgents, of the article's interface and of Trinity's workflows has an effect, or is
refused by name.

The fixture `compare` runs an adapter twice; `test_every_argument.py` has the tests of the tuner.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headrace_integrations
from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.hello_agents import RLTrainingTool
from headrace.rl import ABTestFramework, DataCollector, HotUpdater, ModelManager, RLRuntime, TrinityRFT
from headrace.stack import Addresses, attach, stack_for
from headrace.trinity import Workflow, run_workflow
from headrace_integrations.practice.sinks import HeadraceSink, TrinitySink
from headrace_integrations.scenarios.games import GameTrainer, MultiAgentGame
from headrace_integrations.scenarios.maths import MathAgentTrainer
from headrace_integrations.trinity.workflows import EID, FormatArgs, TrinityExperience, TrinityTask
from headrace_integrations.tuner import configs
from tests.unit.integrations.conftest import VERSION, RecordingGatewayStack, Rig

ADAPTERS = (
    "hello_agents", "judging", "practice", "rl", "scenarios", "selection", "shadow", "stack", "trinity", "tuner",
)  # fmt: skip
SOURCES = Path(headrace_integrations.__file__).parent

# HelloAgents.

HELLO: dict[str, list[Any]] = {
    "model_name": ["other"], "dataset": ["more"], "split": ["test"], "max_samples": [1], "num_epochs": [2],
    "output_dir": ["elsewhere"], "use_lora": [False], "batch_size": [2], "format": ["sft"], "reward_type": ["step"],
    "custom_dataset": [[{"prompt": "1", "ground_truth": "2", "completion": "3"}]], "use_wandb": [True],
    "custom_reward": [lambda completions, **_: [0.125]], "use_tensorboard": [False], "wandb_project": ["p"],
    "learning_rate": [1e-3], "max_grad_norm": [0.5], "lora_r": [4], "lora_rank": [4], "lora_alpha": [8.0], "seed": [7],
    "kl_coef": [0.25], "beta": [0.25], "num_generations": [2], "temperature": [0.5], "max_new_tokens": [5],
    "max_completion_length": [5], "gradient_accumulation_steps": [2], "accelerate_config": [{"mixed_precision": "no"}],
    "penalty_weight": [0.5], "max_length": [1], "step_bonus": [0.5], "model_path": ["x"], "learning_rat": [1],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["sft", "grpo"])
@pytest.mark.parametrize("name", HELLO)
def test_a_parameter_of_hello_agents_training(name: str, kind: str, compare: Callable[..., None]) -> None:
    def trained(**more: Any) -> Callable[[], object]:
        def work() -> object:
            trainer = RLTrainingTool()
            for data in ("sums", "more"):
                rows = [{"question": f"{data} {n}", "answer": f"{n}"} for n in range(4)]
                trainer.register_dataset(data, rows)
            parameters = {
                "action": "train",
                "algorithm": kind,
                "model_name": "base",
                "output_dir": "out",
                "dataset": "sums",
            }
            parameters |= more
            if "custom_dataset" in more:
                parameters.pop("dataset")
            result = json.loads(trainer.run(parameters))
            if result["status"] != "success":
                raise UsageError(result["message"])
            return result

        return work

    value = "rl" if (name, kind) == ("format", "sft") else HELLO[name][0]
    compare(name, trained(), trained(**{name: value}))


# The article.


def article_trainer(**more: Any) -> Callable[[], object]:
    def work() -> object:
        framework = TrinityRFT(**{"algorithm": "ppo", **more})
        _ = framework.stack
        framework.close()
        problems = [{"question": f"{n}", "answer": "4"} for n in range(4)]
        trainer = MathAgentTrainer(**{"algorithm": "ppo", **more})
        agent = SimpleNamespace(connect=lambda **_: None, run=lambda text: f"Thought\n1. {text}\nAnswer: 4")
        return [step.number for step in trainer.train(agent, problems, group_size=1)]

    return work


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("algorithm", "", "dpo"), ("model_config", "base_model", "other"), ("model_config", "lora_rank", 4),
        ("training_config", "learning_rate", 1e-4), ("training_config", "batch_size", 2),
        ("training_config", "gradient_accumulation_steps", 2), ("training_config", "epochs", 2),
        ("training_config", "checkpoint_dir", "kept"), ("settings", "trainer.seed", 3),
        ("model_config", "learning_rat", 1),
        ("training_config", "warmup", 1), ("training_config", "epochs", 1.5), ("model_config", "lora_rank", "big"),
        ("training_config", "batch_size", True),
    ],
)  # fmt: skip
def test_an_argument_of_the_articles_trainer(
    argument: str, name: str, value: Any, compare: Callable[..., None]
) -> None:
    compare(name or argument, article_trainer(), article_trainer(**{argument: {name: value} if name else value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algorithm", "grpo"), ("train_interval", 3), ("update_interval", 4), ("checkpoint_dir", "kept"),
        ("model_config", {"lora_rank": 2}), ("settings", {"trainer.seed": 1}), ("learning_rate", 1e-4), ("epochs", 3),
        ("batch_size", 2), ("gradient_accumulation_steps", 2), ("canary_ratio", 0.1), ("train_interval", 2.5),
        ("settings", {"trainer.steps_per_version": 5}),
    ],
)  # fmt: skip
def test_a_key_of_the_runtimes_config(name: str, value: Any, rig: Rig, compare: Callable[..., None]) -> None:
    rig.stack.is_private = True

    def started(**more: Any) -> Callable[[], object]:
        def work() -> object:
            runtime = RLRuntime(SimpleNamespace(run=len), more).start()
            runtime.stop()
            return None

        return work

    compare(name, started(), started(**{name: value}))


def test_settings_that_contradict_an_argument_are_refused() -> None:
    with pytest.raises(UsageError, match=r"trainer_config\.update_interval sets trainer\.steps_per_version = 3"):
        RLRuntime(object(), {"update_interval": 3, "settings": {"trainer.steps_per_version": 5}})
    with pytest.raises(UsageError, match=r"training_config\.learning_rate sets"):
        TrinityRFT("ppo", {}, {"learning_rate": 1e-4}, {"trainer.optimizer.learning_rate": 1e-5})
    with pytest.raises(UsageError, match="algorithm sets"):
        TrinityRFT("ppo", {}, {}, {"trainer.algorithm": "grpo"})


class _RecordingRegistry:
    """Registry that records requests."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __getattr__(self, name: str) -> Any:
        def ask(*words: Any, **named: Any) -> Any:
            self._rig.note(name, words, named)
            return SimpleNamespace(champion=VERSION, aliases={"v1.0": VERSION, "v1.1": "tiny@ffffffffffffffff"})

        return ask


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "canary"), ("canary_ratio", 0.2), ("check_after_updates", 7), ("strategy", "at once"),
        ("canary_ratio", "some"), ("check_after_updates", 0), ("surprise", 1), ("rollout_interval", 5),
    ],
)  # fmt: skip
def test_a_key_of_the_updaters_config(name: str, value: Any, rig: Rig, compare: Callable[..., None]) -> None:
    rig.stack.__dict__["registry"] = _RecordingRegistry(rig)

    def updated(**config: Any) -> Callable[[], object]:
        def work() -> object:
            updater = HotUpdater(object(), config)
            inner = updater._updater
            return (
                updater.strategy,
                inner.canary_ratio if updater.strategy == "canary" else "",
                inner.check_after_updates,
            )

        return work

    with rig.stack:
        compare(name, updated(), updated(**{name: value}))


@pytest.mark.parametrize(
    "traffic", [{"a": 0.9, "b": 0.2}, {"b": 0.2}, {"a": 0.8}, {"a": 0.8, "b": 0.2, "c": 0}, {"v1.0": 0.8}, {}]
)
def test_traffic_shares_with_a_wrong_sum_are_refused(traffic: dict[str, float], rig: Rig) -> None:
    desk: Any = _RecordingRegistry(rig)
    desk.versions = lambda *_, **__: ()
    rig.stack.__dict__["registry"] = desk
    with rig.stack:
        with pytest.raises(UsageError, match="traffic"):
            ABTestFramework("v1.0", "v1.1", traffic)
        with pytest.raises(UsageError, match="traffic_ratio"):
            ModelManager().create_ab_test("v1.0", "v1.1", traffic)
        assert ABTestFramework("v1.0", "v1.1", {"a": 0.8, "b": 0.2}).share == "1/5"
        assert ABTestFramework("v1.0", "v1.1", {"v1.0": 0.7, "v1.1": 0.3}).share == "3/10"
        with pytest.raises(UsageError, match="metrics"):
            ABTestFramework("v1.0", "v1.1", {"a": 0.8, "b": 0.2}, ["accuracy", "made_up"])


@pytest.mark.parametrize(
    ("fields", "feedback", "name"),
    [
        ({"thinking": True}, None, "thinking"), ({"thoughts": "no"}, None, "thoughts"),
        ({"user_feedback": False}, {"rating": 4}, "user_feedback"), ({}, {"stars": 4}, "stars"),
        ({}, {"comment": "good"}, "comment"), ({}, {"rating": "four"}, "rating"), ({}, {"rating": True}, "rating"),
    ],
)  # fmt: skip
def test_collector_refuses_useless_arguments(
    fields: dict[str, Any], feedback: dict[str, Any] | None, name: str, rig: Rig
) -> None:
    with rig.stack, pytest.raises(UsageError, match=name):
        DataCollector(fields).collect(SimpleNamespace(connect=lambda **_: None, run=len), "Who?", feedback)


# Trinity's workflows.


class _Plain(Workflow):
    """Workflow that gives every run the same reward."""

    async def run_async(self) -> list[Any]:
        client = self.model.get_openai_async_client()
        await client.chat.completions.create(model=client.model_path, messages=[], **dict(self.task.rollout_args))
        words = [self.task.task_desc, self.task.truth, self.task.workflow_args, self.task.reward_fn_args]
        return [SimpleNamespace(reward=0.5, metrics={"length": float(len(repr(words)))})]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("raw_task", {"prompt": "a longer one", "response": "x"}), ("format_args", FormatArgs("response")),
        ("workflow", len), ("repeat_times", 5), ("rollout_args", {"max_tokens": 3}), ("workflow_args", {"a": 1}),
        ("reward_fn_args", {"b": 2}), ("is_eval", True), ("batch_id", "b-7"), ("task_id", "other"),
    ],
)  # fmt: skip
def test_a_field_of_a_trinity_task(name: str, value: Any, rig: Rig, compare: Callable[..., None]) -> None:
    if name == "batch_id":
        fields = {field.name for field in dataclasses.fields(EID)}
        assert "batch" in fields, "it is the batch of the experiences: test_workflow"
        return

    def played(**more: Any) -> Callable[[], object]:
        async def steps() -> list[Any]:
            task = TrinityTask(**{"raw_task": {"prompt": "1", "response": "2"}, "task_id": "t", **more})
            return [step.run_metrics async for step in run_workflow(rig.stack, _Plain, [task], repeat_times=2)]

        return lambda: blocking(steps())

    assert name in {field.name for field in dataclasses.fields(TrinityTask)}
    compare(name, played(), played(**{name: value}))


@pytest.mark.parametrize("name", ["token_level_reward", "advantages", "truncate_status", "made_up"])
def test_unknown_attributes_of_an_experience_cannot_be_set(name: str) -> None:
    experience = TrinityExperience(EID(), [1, 2], 1, [0.0])
    with pytest.raises(AttributeError, match=name):
        setattr(experience, name, 1)


# What every adapter shares.


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("api_key", {"base": "b", "api_key": "k"}), ("internal_key", {"base": "b", "internal_key": "k"}),
        ("url", {"url": "http://other", "addresses": Addresses()}), ("data_dir", {"url": "http://a", "data_dir": "d"}),
    ],
)  # fmt: skip
def test_attach_refuses_contradicting_arguments(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=name):
        attach(**arguments)


def test_entered_stack_refuses_settings_for_a_new_stack(tmp_path: Path) -> None:
    with RecordingGatewayStack() as stack:
        for settings in ({"inference.tool_parser": "x"}, {"gateway.port": 1}):
            with pytest.raises(UsageError, match=next(iter(settings))), stack_for(None, settings):
                pass
        with pytest.raises(UsageError, match="checkpoint_dir"), stack_for(None, {}, tmp_path):
            pass
    for sink in (HeadraceSink, TrinitySink):
        with pytest.raises(UsageError, match="model"):
            sink(stack, "other")
        with pytest.raises(UsageError, match="api_key"):
            sink(stack, api_key="k")


def test_a_game_trainer_trains_the_agents_that_it_was_given(rig: Rig) -> None:
    agents = {name: SimpleNamespace(run=len) for name in ("werewolf_1", "villager_1", "villager_2")}
    MultiAgentGame({"werewolf": 1, "villager": 2}, agents)
    rig.stack.is_private = True
    for name in agents:
        trainer = GameTrainer([agents[name]])
        for player in agents:
            record = {"conversation_id": f"s-{name}-{player}"}
            trainer.add_trajectory({"name": player, "role": "any", "events": {}, "records": [record]})
        assert [record["conversation_id"] for record in trainer.trainer.buffer] == [f"s-{name}-{name}"]


def modules() -> list[str]:
    module_names = [f"headrace_integrations.{name}" for name in ADAPTERS]
    for name in ADAPTERS:
        module_names += [
            f"headrace_integrations.{name}.{info.name}" for info in pkgutil.iter_modules([str(SOURCES / name)])
        ]
    return module_names


@pytest.mark.parametrize("module", modules())
def test_every_parameter_is_read(module: str) -> None:
    """A parameter is ignored if no line of its function reads it."""
    source = inspect.getsource(importlib.import_module(module))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_declaration(node):
            continue
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        names = {argument.arg for argument in every if argument is not None and not argument.arg.startswith("_")}
        names -= {"self", "cls"}
        read = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        assert names - read - FIXED.get(node.name, set()) == set(), f"{module}.{node.name}"


FIXED = {
    "avg_time_judge": {"task"}, "avg_token_consumption_judge": {"task"}, "hold": {"version"}, "run": {"number"},
    "commit": {"client"}, "serving": {"name"}, "should_select": {"request"},
}  # fmt: skip
"""Parameters of an interface that cannot change the result of an implementation."""


def _is_declaration(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function only declares an interface: a docstring, `...` or an error."""
    return all(
        isinstance(line, ast.Raise) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in node.body
    )


@pytest.mark.parametrize("module", modules())
def test_no_public_function_swallows_unknown_arguments(module: str) -> None:
    imported_module = importlib.import_module(module)
    for name, member in vars(imported_module).items():
        if name.startswith("_") or getattr(member, "__module__", None) != module or not callable(member):
            continue
        functions = [member] if inspect.isfunction(member) else [
            method for key, method in vars(member).items() if inspect.isfunction(method) and not key.startswith("_")
        ]  # fmt: skip
        for function in functions:
            open_ended = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
            assert not open_ended or function.__name__ in OPEN, f"{module}.{name}.{function.__name__}"


OPEN = {"create_reward", "run_and_collect", "accuracy", "call_function", "reward_of_completion"}
"""`create_reward` and `run_and_collect` check their options; the others get columns of a data set."""


def test_open_ended_functions_refuse_unknown_options(rig: Rig) -> None:
    from headrace.hello_agents import create_reward
    from headrace.rl import run_and_collect

    with rig.stack, pytest.raises(TypeError, match="surprise"):
        run_and_collect(object(), "Who?", surprise=1)
    with pytest.raises(UsageError, match="surprise"):
        create_reward("step", surprise=1)


def test_every_field_of_the_tuners_objects_is_read() -> None:
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py") if path.name != "configs.py")
    for kind in vars(configs).values():
        if dataclasses.is_dataclass(kind) and kind is not configs.TinkerConfig:  # refused as a whole
            for field in dataclasses.fields(kind):
                assert f".{field.name}" in text or f'"{field.name}"' in text, f"{kind}.{field.name}"
