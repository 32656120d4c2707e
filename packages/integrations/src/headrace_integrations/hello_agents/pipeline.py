"""`AgenticRLPipeline`: load data, train with sft, evaluate, train that model with grpo, evaluate; configured by one
JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace_integrations.hello_agents.parameters import DATA
from headrace_integrations.hello_agents.tool import RLTrainingTool
from headrace_schemas.values.text import printable, read_user_text

_SECTIONS = {"model", "sft", "grpo", "eval"}
_SET_BY_PIPELINE = {"action", "algorithm", "model_name", "model_path"}
"""Parameters that the pipeline sets itself."""


class AgenticRLPipeline:
    """Pipeline of training and evaluation stages. Stages raise `HeadraceError`.

    The configuration file has `model.base_model`, `sft` and `grpo` with `output_dir`, `num_epochs` and `batch_size`,
    and `eval.max_samples`. `sft`, `grpo` and `eval` may have any other parameter of the tool.
    """

    def __init__(self, config_path: str, rl_tool: RLTrainingTool | None = None) -> None:
        try:
            self.config: dict[str, Any] = json.loads(read_user_text(Path(config_path)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"{config_path} is not valid JSON: {error}") from None
        except ValueError as error:
            raise UsageError(f"{config_path} {error}") from None
        if not isinstance(self.config, dict) or not all(isinstance(section, dict) for section in self.config.values()):
            raise UsageError(f"{config_path}: must be an object with the sections {', '.join(sorted(_SECTIONS))}")
        missing = _SECTIONS - set(self.config)
        if missing:
            raise UsageError(f"{config_path}: the section {min(missing)!r} is missing; add it")
        unknown = [
            *(set(self.config) - _SECTIONS),
            *(f"model.{name}" for name in set(self.config["model"]) - {"base_model"}),
            *(f"{stage}.{name}" for stage in self.config for name in _SET_BY_PIPELINE & set(self.config[stage])),
        ]
        if unknown:
            raise UsageError(f"{config_path}: {printable(min(unknown))} has no effect here; leave it out")
        self.rl_tool = rl_tool or RLTrainingTool()
        self.results: dict[str, Any] = {}

    def stage1_prepare_data(self) -> None:
        """Load the data sets of the stages, so that invalid data are reported before training."""
        for stage, form in (("sft", "sft"), ("grpo", "rl")):
            data = {name: value for name, value in self.config[stage].items() if name in DATA}
            parameters = {**data, "action": "load_dataset", "format": form}
            self.results[f"{stage}_data"] = self._run_tool(parameters)

    def stage2_sft_training(self) -> str:
        return self._train("sft", self.config["model"]["base_model"])

    def stage3_sft_evaluation(self, model_path: str) -> dict[str, Any]:
        return self._evaluate("sft", model_path)

    def stage4_grpo_training(self, sft_model_path: str) -> str:
        """Train the model of the sft stage with grpo."""
        return self._train("grpo", sft_model_path)

    def stage5_grpo_evaluation(self, model_path: str) -> dict[str, Any]:
        return self._evaluate("grpo", model_path)

    def run(self) -> dict[str, Any]:
        """Run every stage and return the results by stage."""
        self.stage1_prepare_data()
        sft = self.stage2_sft_training()
        self.stage3_sft_evaluation(sft)
        grpo = self.stage4_grpo_training(sft)
        self.stage5_grpo_evaluation(grpo)
        return self.results

    def _train(self, algorithm: str, model_name: str) -> str:
        section = {"use_lora": True, **self.config[algorithm]}
        result = self._run_tool({**section, "action": "train", "algorithm": algorithm, "model_name": model_name})
        self.results[f"{algorithm}_training"] = result
        return str(result["output_dir"])

    def _evaluate(self, stage: str, model_path: str) -> dict[str, Any]:
        lora = self.config[stage].get("use_lora", True)
        result = self._run_tool(
            {"use_lora": lora, **self.config["eval"], "action": "evaluate", "model_path": model_path}
        )
        self.results[f"{stage}_evaluation"] = result
        return result

    def _run_tool(self, parameters: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.rl_tool.run(parameters))
        if result["status"] != "success":
            raise HeadraceError(f"{parameters['action']}: {result['message']}")
        return result
