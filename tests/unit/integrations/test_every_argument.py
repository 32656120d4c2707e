"""Tests that every argument of the tuner interfaces has an effect on the adapter, or is refused by name.

Each test runs an adapter twice, with one argument changed. Equal effects mean that the argument was ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.tuner import (
    AlgorithmConfig,
    DatasetConfig,
    PromptTuneConfig,
    TinkerConfig,
    TunerModelConfig,
    WorkflowOutput,
    select_model,
    tune,
    tune_prompt,
)
from headrace_integrations.tuner.tuning import _plan
from headrace_operations.trinity_yaml import KEYS
from tests.unit.integrations.conftest import Rig, fake_dspy, judge, workflow

# The original interfaces (agentscope 1.0.21, hello-agents 0.2.5, trinity-rft 0.6.0), each field with another value.
MODEL: dict[str, Any] = {
    "model_path": "other", "max_model_len": 512, "temperature": 0.5, "top_p": 0.9, "max_tokens": 7,
    "enable_thinking": True, "tensor_parallel_size": 2, "inference_engine_num": 2, "tool_call_parser": "other",
    "reasoning_parser": "none", "tinker_config": TinkerConfig(),
}  # fmt: skip
ALGORITHM: dict[str, Any] = {
    "algorithm_type": "ppo", "learning_rate": 1e-3, "group_size": 3, "batch_size": 1, "save_interval_steps": 1,
    "eval_interval_steps": 1,
}  # fmt: skip
DATA: dict[str, Any] = {"path": "other", "name": "main", "split": "test", "total_epochs": 3, "total_steps": 1}
TUNE: dict[str, Any] = {
    "workflow_func": None, "judge_func": None, "train_dataset": None, "eval_dataset": "rows", "model": None,
    "auxiliary_models": {"partner": "served"}, "algorithm": AlgorithmConfig(group_size=5), "project_name": "mine",
    "experiment_name": "first", "monitor_type": "wandb", "config_path": "none.yaml",
}  # fmt: skip
PROMPT: dict[str, Any] = {
    "lm_model_name": "openai/x", "optimization_level": "heavy", "eval_display_progress": False, "eval_display_table": 1,
    "eval_num_threads": 2, "compare_performance": False,
}  # fmt: skip
BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [0, -1, "hot", True, float("nan")], "max_tokens": [0, 1.5, "many"], "top_p": ["x"],
    "group_size": [0, 1.5, True], "batch_size": [0, "x"], "learning_rate": ["fast", float("inf")],
    "save_interval_steps": [0, -1], "eval_interval_steps": [0], "total_epochs": [0, 1.5], "total_steps": [0, "x"],
    "max_model_len": [0, "long"],
}  # fmt: skip


def tuned(**arguments: Any) -> Callable[[], object]:
    """Return a call of `tune` with defaults for missing `arguments`. Arguments of None are left out."""
    options: dict[str, Any] = {
        "workflow_func": workflow, "judge_func": judge, "train_dataset": DatasetConfig(path="rows", total_epochs=2),
        "model": TunerModelConfig(model_path="base"), "algorithm": AlgorithmConfig(batch_size=2, group_size=2),
    }  # fmt: skip
    options = {name: value for name, value in {**options, **arguments}.items() if value is not None}
    return lambda: tune(**options)


def test_the_tables_name_every_field_of_the_dataclasses() -> None:
    kinds = ((MODEL, TunerModelConfig), (ALGORITHM, AlgorithmConfig), (DATA, DatasetConfig), (PROMPT, PromptTuneConfig))
    for table, kind in kinds:
        assert set(table) == {field.name for field in dataclasses.fields(kind)}
        for name in ("learning_rat", "made_up"):
            with pytest.raises(TypeError, match=name):
                kind(**{**table, name: 1})


@pytest.mark.parametrize("name", MODEL)
def test_a_field_of_the_model_config(name: str, compare: Callable[..., None]) -> None:
    changed = TunerModelConfig(**{"model_path": "base", name: MODEL[name]})
    compare(name, tuned(), tuned(model=changed))


@pytest.mark.parametrize("name", MODEL)
def test_a_field_of_an_auxiliary_models_config(name: str, compare: Callable[..., None]) -> None:
    plain = tuned(auxiliary_models={"partner": TunerModelConfig(model_path="base")})
    changed = TunerModelConfig(**{"model_path": "base", name: MODEL[name]})
    compare(name, plain, tuned(auxiliary_models={"partner": changed}))


@pytest.mark.parametrize("held_out", [None, DatasetConfig(path="rows", split="test")], ids=["alone", "evaluated"])
@pytest.mark.parametrize("name", ALGORITHM)
def test_a_field_of_the_algorithm_config(
    name: str, held_out: DatasetConfig | None, compare: Callable[..., None]
) -> None:
    plain: dict[str, Any] = {"batch_size": 2, "group_size": 2}
    changed = AlgorithmConfig(**{**plain, name: ALGORITHM[name]})
    compare(
        name,
        tuned(algorithm=AlgorithmConfig(**plain), eval_dataset=held_out),
        tuned(algorithm=changed, eval_dataset=held_out),
    )


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("path", ["rows", "rows/train.jsonl"])
@pytest.mark.parametrize("name", DATA)
def test_a_field_of_a_data_set(name: str, path: str, argument: str, compare: Callable[..., None]) -> None:
    changed = {"path": path, name: DATA[name]}
    if name == "path":
        changed["path"] = path.replace("rows", "other")
    compare(
        name,
        tuned(**{argument: DatasetConfig(path=path)}),
        tuned(**{argument: DatasetConfig(**changed)}),
    )


@pytest.mark.parametrize("name", TUNE)
def test_an_argument_of_tune(name: str, compare: Callable[..., None]) -> None:
    values = {
        **TUNE, "eval_dataset": DatasetConfig(path="rows"), "train_dataset": DatasetConfig(path="other"),
        "model": TunerModelConfig(model_path="base", max_tokens=3),
    }  # fmt: skip

    async def other(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=0.75, response=await model([]))

    Path("none.yaml").write_text(yaml.safe_dump({"algorithm": {"kl_loss_fn_args": {"kl_coef": 0.5}}}))
    if name in ("workflow_func", "judge_func"):
        changed = tuned(judge_func=None) if name == "judge_func" else tuned(workflow_func=other, judge_func=None)
        compare(name, tuned(), changed)
    else:
        compare(name, tuned(), tuned(**{name: values[name]}))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_a_wrong_value_of_the_tuner_is_refused_by_name(name: str, value: Any, rig: Rig) -> None:
    model: dict[str, Any] = {"model_path": "base"}
    algorithm: dict[str, Any] = {"batch_size": 2}
    data: dict[str, Any] = {"path": "rows"}
    table = next(table for table, fields in ((model, MODEL), (algorithm, ALGORITHM), (data, DATA)) if name in fields)
    table[name] = value
    arguments: dict[str, Any] = {
        "model": TunerModelConfig(**model),
        "algorithm": AlgorithmConfig(**algorithm),
        "train_dataset": DatasetConfig(**data),
    }
    if name == "top_p":
        arguments = {"auxiliary_models": {"partner": arguments["model"]}}
        tuned(**arguments)()
        assert any(name in str(words) for words in rig.stack.seen if words[0] == "errors")  # type: ignore[index]
        return
    with pytest.raises(UsageError, match=f"^{name} = "):
        tuned(**arguments)()


# A Trinity YAML as the tuner's configuration.

YAML = {
    "model.model_path": "base", "buffer.batch_size": 2, "algorithm.repeat_times": 2, "algorithm.algorithm_type": "grpo",
    "buffer.explorer_input.taskset.path": "rows",
}  # fmt: skip
VALUES: dict[str, Any] = {
    "mode": "train", "continue_from_checkpoint": True, "algorithm.kl_loss_fn": "k3",
    "monitor.monitor_type": "tensorboard",
    "trainer.save_hf_checkpoint": "always", "synchronizer.sync_method": "checkpoint", "model.top_k": -1,
    "synchronizer.sync_style": "fixed", "trainer.ulysses_sequence_parallel_size": 1, "trainer.total_steps": 1,
    "algorithm.algorithm_type": "ppo", "model.model_path": "other", "buffer.explorer_input.taskset.path": "other",
    "buffer.explorer_input.taskset.split": "test", "explorer.rollout_model.tool_call_parser": "other",
    "explorer.rollout_model.reasoning_parser": "none", "explorer.rollout_model.dtype": "float16",
    "buffer.explorer_input.taskset.rollout_args.*": 1, "explorer.listen_address": "0.0.0.0", "project": "p",
    "group": "g", "name": "n", "checkpoint_root_dir": "kept", "buffer.explorer_input.taskset.subset_name": "main",
}  # fmt: skip
AS_HERE = {key for key in KEYS if getattr(KEYS[key], "__qualname__", "").startswith("accept_only.")}
"""Keys that accept only the value that corresponds to the fixed behaviour."""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables for a flat mapping with dotted names."""
    table_of_tables: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, name = key.split(".")
        inner = table_of_tables
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return table_of_tables


def from_yaml(flat: Mapping[str, Any]) -> Callable[[], object]:
    def work() -> object:
        Path("config.yaml").write_text(yaml.safe_dump(nested(flat)))
        return tuned(config_path="config.yaml", model=None, algorithm=None, train_dataset=None)()

    return work


@pytest.mark.parametrize("key", [key for key in KEYS if key not in AS_HERE])
def test_a_key_of_a_trinity_file_changes_the_training_or_is_named(key: str, compare: Callable[..., None]) -> None:
    value, name = VALUES.get(key, 3), key.replace("*", "repetition_penalty")
    tuner_name = "name" if key.endswith(".subset_name") else name  # its name in the tuner's data set
    compare(tuner_name, from_yaml(YAML), from_yaml({**YAML, name: value}))


@pytest.mark.parametrize("key", sorted(AS_HERE))
def test_a_key_that_is_always_so_refuses_every_other_value(key: str, rig: Rig) -> None:
    from_yaml({**YAML, key: VALUES.get(key, True)})()
    for value in ("made up", 17, [1], {"a": 1}):
        with pytest.raises(UsageError, match=key.rpartition(".")[2]):
            from_yaml({**YAML, key: value})()


@pytest.mark.parametrize("key", ["surprise", "model.temprature", "buffer.explorer_input.tasksets.path", "trainer.lr"])
def test_a_key_that_trinity_does_not_have_is_refused(key: str, rig: Rig) -> None:
    with pytest.raises(UsageError, match=key):
        from_yaml({**YAML, key: 1})()


@pytest.mark.parametrize("value", ["\x1b[2J", [1, 2], {"a": {}}, True, -1, 1e400], ids=repr)
def test_wrong_values_of_a_trinity_file_are_one_printable_sentence(value: Any, rig: Rig) -> None:
    for key in KEYS:
        Path("config.yaml").write_text(yaml.safe_dump(nested({**YAML, key.replace("*", "n"): value})))
        refusal = ""
        try:
            _plan(None, None, None, None, "config.yaml")
        except UsageError as error:
            refusal = str(error)
        assert refusal.isprintable(), key


# Prompt and model selection.


async def prompted(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
    return WorkflowOutput(response=f"{system_prompt} {task['answer']}")


@pytest.fixture
def dspy(rig: Rig) -> Iterator[None]:
    import sys

    before = sys.modules.get("dspy")
    fake_dspy(rig.note)
    yield
    sys.modules.pop("dspy")
    if before is not None:
        sys.modules["dspy"] = before


def tuned_prompt(**more: Any) -> Callable[[], object]:
    options: dict[str, Any] = {
        "workflow": prompted, "init_system_prompt": "Add.", "judge_func": judge,
        "train_dataset": DatasetConfig(path="rows"), "eval_dataset": DatasetConfig(path="rows", split="test"),
    }  # fmt: skip
    options = {name: value for name, value in {**options, **more}.items() if value is not None}
    return lambda: tune_prompt(**options)


@pytest.mark.usefixtures("dspy")
@pytest.mark.parametrize("name", PROMPT)
def test_a_field_of_the_prompt_config(name: str, compare: Callable[..., None]) -> None:
    changed = PromptTuneConfig(**{name: PROMPT[name]})
    compare(name, tuned_prompt(eval_dataset=None), tuned_prompt(eval_dataset=None, config=changed))


@pytest.mark.usefixtures("dspy")
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_a_data_set_of_prompt_tuning(argument: str, name: str, compare: Callable[..., None]) -> None:
    plain = DatasetConfig(path="rows")
    changed = DatasetConfig(**{"path": "rows", name: DATA[name]})
    compare(name, tuned_prompt(**{argument: plain}), tuned_prompt(**{argument: changed}))


@pytest.mark.parametrize("name", DATA)
def test_a_data_set_of_model_selection(name: str, compare: Callable[..., None]) -> None:
    async def model(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(usage=None)

    async def play(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response=task["of"])

    async def rate(task: Any, response: Any) -> Any:
        return SimpleNamespace(reward=float(int(task["answer"]) + len(response["response"])))

    def chosen(**data: Any) -> Callable[[], object]:
        options: dict[str, Any] = {"train_dataset": DatasetConfig(**{"path": "rows", **data})}
        options |= {"workflow_func": play, "judge_func": rate, "candidate_models": [model, model]}
        return lambda: blocking(select_model(**options))

    compare(name, chosen(), chosen(**{name: DATA[name]}))
