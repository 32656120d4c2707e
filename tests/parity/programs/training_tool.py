"""HelloAgents: the tool, rewards, the pipeline, accelerate's files, export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.hello_agents import AgenticRLPipeline, RLTrainingTool, check_rows, create_reward
from headrace_integrations.hello_agents.rewards import accuracy
from headrace_operations.accelerate_yaml import settings_of_accelerate
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
