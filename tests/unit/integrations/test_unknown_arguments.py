"""Tests that adapters honour every argument or refuse it by name, and that none is silently ignored.

The part of `make check NAME=parity` that needs no services is included: signatures, records, conversions and refusals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from headrace.errors import UsageError
from headrace.rl import OnlineTrainer, RLRuntime, TrinityRFT
from headrace_integrations.hello_agents import AgenticRLPipeline, RLTrainingTool, tool
from headrace_integrations.hello_agents.parameters import BY_ACTION, PARAMETERS, SETTINGS
from tests.parity.program import PAGE, expected_ids, items, problems
from tests.parity.stage import PROGRAMS, Stage

ROWS = [
    {"question": f"{n} + 1", "answer": f"{n + 1}", "prompt": f"{n} + 1", "ground_truth": f"{n + 1}"} for n in range(8)
]
SAMPLES: dict[str, Any] = {
    "algorithm": "grpo", "model_name": "base", "num_epochs": 2, "use_lora": True, "batch_size": 3, "dataset": "sums",
    "split": "train", "max_samples": 4, "format": "rl", "reward_type": "accuracy", "gradient_accumulation_steps": 2,
    "learning_rate": 1e-6, "max_grad_norm": 0.5, "lora_r": 4, "lora_rank": 4, "lora_alpha": 8, "seed": 7,
    "kl_coef": 0.05, "beta": 0.04, "num_generations": 8, "temperature": 0.8, "max_new_tokens": 64,
    "max_completion_length": 64, "use_tensorboard": True, "use_wandb": False, "custom_dataset": ROWS,
    "model_path": "base",
}  # fmt: skip
MADE_UP = [
    "learning_rat", "lr", "warmup_ratio", "save_steps", "wandb_project", "x" * 18_000, "a\x1b[2J", "\u202eb",
    "a-" * 9_000,
]  # fmt: skip


class Started(Exception):
    """Error that is raised where the tool would start its services."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, object]]:
    settings: list[Mapping[str, object]] = []

    def stack_for(_base: str, stack_settings: Mapping[str, object]) -> NoReturn:
        settings.append(dict(stack_settings))
        raise Started

    monkeypatch.setattr(tool, "stack_for", stack_for)
    return settings


def answer(parameters: Mapping[str, Any]) -> dict[str, Any]:
    trainer = RLTrainingTool()
    trainer.register_dataset("sums", ROWS)
    result: dict[str, Any] = json.loads(trainer.run(parameters))
    return result


def train(tmp_path: Path, **more: Any) -> dict[str, Any]:
    data = {} if "custom_dataset" in more else {"dataset": "sums"}
    needed = {"action": "train", "algorithm": "grpo", "model_name": "base", "output_dir": str(tmp_path / "out")}
    return answer({**needed, **data, **more})


def test_the_training_arguments_of_the_issue_reach_the_trainer(
    tmp_path: Path, started: list[Mapping[str, object]]
) -> None:
    train(tmp_path, learning_rate=1e-6, num_generations=8, temperature=0.8, kl_coef=0.05, batch_size=2)
    (settings,) = started
    assert settings["trainer.optimizer.learning_rate"] == 1e-6
    assert settings["trainer.group_size"] == 8
    assert settings["trainer.loss.kl"] == 0.05
    assert settings["trainer.batch_experiences"] == 16
    assert tool.TrainingPlan.of({"temperature": 0.8, "max_new_tokens": 9}).temperature == 0.8


@pytest.mark.parametrize("name", SETTINGS)
def test_a_parameter_that_is_a_setting_reaches_the_trainer(
    tmp_path: Path, started: list[Mapping[str, object]], name: str
) -> None:
    train(tmp_path, **{name: SAMPLES[name]})
    assert started[0][SETTINGS[name][0]] == SAMPLES[name]


@pytest.mark.parametrize("name", [*PARAMETERS, *MADE_UP], ids=lambda name: ascii(name)[:20])
@pytest.mark.parametrize("action", BY_ACTION)
def test_every_argument_is_honoured_or_refused_by_name(
    tmp_path: Path, started: list[Mapping[str, object]], action: str, name: str
) -> None:
    if name in ("action", "output_dir", "custom_reward", "accelerate_config"):
        pytest.skip("needed by every call, or an object of its own")
    value = SAMPLES.get(name, 1)
    if action == "train":
        result = train(tmp_path, **{name: value})
    else:
        needed: dict[str, Any] = {"action": action, "dataset": "sums", "model_path": "base"}
        needed = {key: needed[key] for key in ("action", *BY_ACTION[action]) if key in needed}
        result = answer({**needed, name: value})
    if (action, name) == ("evaluate", "use_lora"):
        assert result["message"].startswith("use_lora = True: base contains a whole model")
        return
    if name == "split" and name in BY_ACTION[action]:
        assert result["message"].startswith("split = 'train': the data set 'sums' is registered")
        return
    if name in BY_ACTION[action]:
        assert started or result["status"] == "success", result
        return
    assert result["status"] == "error"
    assert name[:20].isprintable() is False or result["message"].startswith(name[:20])
    assert result["message"].isprintable()
    assert len(result["message"]) < 1_000
    assert not started


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"algorithm": "sft", "kl_coef": 0.1}, "kl_coef: applies only to grpo"),
        ({"algorithm": "sft", "num_generations": 8}, "num_generations: applies only to grpo"),
        ({"format": "sft"}, "format = 'sft'"),
        ({"use_lora": False, "lora_r": 8}, "lora_r: applies only to adapters"),
        ({"temperature": 0}, "temperature = 0"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"num_generations": 1}, "num_generations = 1"),
        ({"num_epochs": 1.5}, "num_epochs = 1.5"),
        ({"batch_size": True}, "batch_size = True"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast'"),
        ({"lora_r": 8, "lora_rank": 8}, "lora_rank: another parameter"),
        ({"beta": 0.1, "kl_coef": 0.1}, "beta: another parameter"),
        ({"max_new_tokens": 8, "max_completion_length": 8}, "max_completion_length"),
        ({"use_tensorboard": False}, "use_tensorboard"),
        ({"use_wandb": True}, "use_wandb"),
        ({"custom_dataset": ROWS, "split": "train"}, "split: custom_dataset"),
    ],
)
def test_contradicting_arguments_are_refused(
    tmp_path: Path, started: list[Mapping[str, object]], parameters: dict[str, Any], words: str
) -> None:
    result = train(tmp_path, **parameters)
    assert result["status"] == "error"
    assert words in result["message"]
    assert not started


def test_the_pipeline_refuses_sections_and_model_keys_that_it_does_not_read(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"model": {"base_model": "b"}, "sft": {}, "grpo": {}, "eval": {}}
    for wrong, name in (({"gropo": {}}, "gropo"), ({"model": {"base_model": "b", "revision": "x"}}, "model.revision")):
        (tmp_path / "config.json").write_text(json.dumps({**plain, **wrong}))
        with pytest.raises(UsageError, match=name):
            AgenticRLPipeline(str(tmp_path / "config.json"))


@pytest.mark.parametrize("name", ["learning_rate", "epochs", "batch_size", "checkpoint_dir", "made_up", "lora_alpha"])
def test_a_training_key_in_model_config_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"model_config\.{name}"):
        TrinityRFT("ppo", {name: 1})


@pytest.mark.parametrize("name", ["lora_rank", "base_model", "made_up", "warmup", "kl_coef"])
def test_a_model_key_in_training_config_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"training_config\.{name}"):
        TrinityRFT("ppo", {}, {name: 1})


def test_keys_that_other_keys_would_override_are_refused() -> None:
    with pytest.raises(UsageError, match="gradient_accumulation_steps"):
        TrinityRFT("ppo", {}, {"gradient_accumulation_steps": 4})
    with pytest.raises(UsageError, match=r"trainer_config\.batch_size"):
        RLRuntime(object(), {"batch_size": 4, "train_interval": 10})
    with pytest.raises(UsageError, match=r"training_config\.epochs = 3"):
        OnlineTrainer(object(), TrinityRFT("ppo", {}, {"epochs": 3}))


FAST = [
    "imports", "records", "signals", "rewards", "pipeline", "accelerate", "convert", "keys", "objects", "choosing",
    "isolation",
]  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_the_program_does_what_the_document_says(name: str, tmp_path: Path) -> None:
    PROGRAMS[name](Stage(tmp_path))


def test_parity_page_has_every_item_and_existing_names() -> None:
    assert problems(items(), set(PROGRAMS)) == []
    assert {item.program for item in items()} == set(PROGRAMS), "a program that shows nothing"


def test_planted_errors_of_the_page_are_reported() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = next(line for line in text.splitlines() if line.startswith("| S0-01"))
    for wrong, problem in (
        ("", "S0-01 is missing"),
        (first + "\n" + first, "S0-01 is listed twice"),
        (first.replace("headrace.rl.OnlineTrainer", "headrace.rl.Nothing"), "nothing is at headrace.rl.Nothing"),
        (first.replace("loop", "loops"), "there is no program loops"),
    ):
        assert any(problem in line for line in problems(items(text.replace(first, wrong)), set(PROGRAMS)))
    refused = items(text.replace("| same |", "| not |"))
    assert any("at most 6" in line for line in problems(refused, set(PROGRAMS)))
    assert len(list(expected_ids())) == 158
