"""HelloAgents: the tool, rewards, the pipeline, accelerate's files, export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.hello_agents import AgenticRLPipeline, RLTrainingTool, check_rows, create_reward
from headrace.hello_agents.rewards import accuracy
from headrace_cli.accelerate_yaml import settings_of_accelerate
from tests.parity.stage import SMALL, Stage, program, raises

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
    found = []
    for said, truth in zip(completions, kwargs.get("ground_truth", []), strict=False):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", said)
        if not numbers:
            found.append(0.0)
            continue
        away = abs(float(numbers[-1]) - float(truth))
        base = 1.0 if away < 0.01 else 0.8 if away < 1.0 else 0.5 if away < 5.0 else 0.0
        found.append(min(1.0, base + (0.1 if "step" in said.lower() or "=" in said else 0.0)))
    return found


@program("rewards", own=True)
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
    said = json.loads(tool.run({"action": "create_reward", "reward_type": "step", "step_bonus": 0.1}))
    assert (said["status"], said["reward_type"], said["step_bonus"]) == ("success", "step", 0.1)
    for form, keys in (
        ("sft", ["prompt", "completion", "text"]),
        ("rl", ["prompt", "ground_truth", "question", "full_answer"]),
    ):
        loaded = json.loads(tool.run({"action": "load_dataset", "dataset": "sums", "format": form, "max_samples": 2}))
        assert (loaded["dataset_size"], loaded["sample_keys"]) == (2, keys)
    assert json.loads(tool.run({"action": "fly"}))["status"] == "error"
    raises(UsageError, "row 2: duplicates row 1", lambda: check_rows([ROWS[0], ROWS[0]]))
    raises(UsageError, "answer is empty", lambda: check_rows([{"question": "?", "answer": " "}]))


@program("tool", own=True)
def tool(stage: Stage) -> None:
    with stage.place("tool"):
        tool = RLTrainingTool(settings=SMALL)
        tool.register_dataset("sums", ROWS)
        tool.register_reward_function("sums", near)
        common = {"dataset": "sums", "use_lora": True, "num_epochs": 1, "batch_size": 2}
        sft = asked(tool, {
            **common, "action": "train", "algorithm": "sft", "model_name": str(stage.base), "max_samples": 2,
            "output_dir": "./models/quick_test_sft",
        })  # fmt: skip
        assert (sft["algorithm"], sft["dataset_size"]) == ("SFT", 2)
        same_as_peft(stage.base, Path(sft["output_dir"]))
        grpo = asked(tool, {
            **common, "action": "train", "algorithm": "grpo", "model_name": sft["output_dir"], "max_samples": 2,
            "output_dir": "./models/quick_test_grpo",
        })  # fmt: skip
        assert grpo["algorithm"] == "GRPO"
        found = asked(
            tool,
            {
                "action": "evaluate",
                "model_path": grpo["output_dir"],
                "dataset": "sums",
                "max_samples": 2,
                "use_lora": True,
            },
        )
        assert found["num_samples"] == 2
        assert found["accuracy"].endswith("%")
        assert 0.0 <= float(found["average_reward"]) <= 1.0


@program("pipeline", own=True)
def pipeline(stage: Stage) -> None:
    """The order and the parameters; what each action does is the program `tool`."""

    class Noting(RLTrainingTool):
        """Answers at once."""

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[dict[str, Any]] = []

        def run(self, parameters: Any) -> str:
            self.asked.append(dict(parameters))
            return json.dumps({"status": "success", "output_dir": parameters.get("output_dir"), "accuracy": "50.00%"})

    with stage.place("pipeline") as folder:
        config = folder / "config.json"
        training = {"num_epochs": 1, "batch_size": 2}
        sft, grpo = {"output_dir": "./models/sft", **training}, {"output_dir": "./models/grpo", **training}
        config.write_text(
            json.dumps({"model": {"base_model": "base"}, "sft": sft, "grpo": grpo, "eval": {"max_samples": 3}})
        )
        noting = Noting()
        made = AgenticRLPipeline(str(config), rl_tool=noting)
        made.run()
    trained = [one for one in noting.asked if one["action"] == "train"]
    assert [(one["algorithm"], one["model_name"]) for one in trained] == [("sft", "base"), ("grpo", "./models/sft")]
    assert all(one["use_lora"] for one in trained)
    evaluated = [one["model_path"] for one in noting.asked if one["action"] == "evaluate"]
    assert evaluated == ["./models/sft", "./models/grpo"]
    assert set(made.results) >= {"sft_training", "sft_evaluation", "grpo_training", "grpo_evaluation"}


@program("accelerate", own=True)
def accelerate(stage: Stage) -> None:
    ranks = {"trainer.backend": "ray", "trainer.ray.ranks": 4, "trainer.compute.dtype": "auto"}
    assert settings_of_accelerate(DDP) == ranks
    sharded = {**ranks, "trainer.optimizer.gradient_norm_max": 1.0, "trainer.ray.shard": "full"}
    assert settings_of_accelerate(ZERO) == sharded
    raises(UsageError, "num_machines = 2", lambda: settings_of_accelerate({**DDP, "num_machines": 2}))
    inner = {"deepspeed_config": {"offload_param_device": "cpu"}}
    raises(UsageError, "offload_param_device = 'cpu'", lambda: settings_of_accelerate({**ZERO, **inner}))


def asked(tool: RLTrainingTool, parameters: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tool.run(parameters))
    assert found["status"] == "success", found.get("traceback")
    return found


def same_as_peft(base: Path, folder: Path) -> None:
    """The adapter merged by PEFT, and the model that was written merged, answer alike."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(loaded, str(folder)).merge_and_unload()
    ours = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    tokens = torch.arange(9, 41)[None]
    with torch.no_grad():
        apart = (theirs(tokens).logits - ours(tokens).logits).abs().max().item()
    assert apart < 1e-4, f"merged by PEFT and by us differ by {apart}"
