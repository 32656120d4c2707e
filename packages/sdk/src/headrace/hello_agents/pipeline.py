"""`AgenticRLPipeline`: data, sft, evaluation, grpo from what sft made, evaluation; from one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace.hello_agents.parameters import DATA
from headrace.hello_agents.tool import RLTrainingTool
from headrace_schemas.text import printable
from headrace_schemas.user_text import read_user_text

_SECTIONS = {"model", "sft", "grpo", "eval"}
_OWN = {"action", "algorithm", "model_name", "model_path"}
"""Parameters that the pipeline sets itself."""


class AgenticRLPipeline:
    """The file has `model.base_model`, `sft` and `grpo` with `output_dir`, `num_epochs`, `batch_size`, and
    `eval.max_samples`; `sft`, `grpo` and `eval` may have any other parameter of the tool. Stages raise
    `HeadraceError`."""

    def __init__(self, config_path: str, rl_tool: RLTrainingTool | None = None) -> None:
        try:
            self.config: dict[str, Any] = json.loads(read_user_text(Path(config_path)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"{config_path} is not valid JSON: {error}") from None
        except ValueError as error:
            raise UsageError(f"{config_path} {error}") from None
        if not isinstance(self.config, dict) or not all(isinstance(one, dict) for one in self.config.values()):
            raise UsageError(f"{config_path}: must be a table of the sections {', '.join(sorted(_SECTIONS))}")
        missing = _SECTIONS - set(self.config)
        if missing:
            raise UsageError(f"{config_path}: there is no {min(missing)!r}")
        unknown = [
            *(set(self.config) - _SECTIONS),
            *(f"model.{name}" for name in set(self.config["model"]) - {"base_model"}),
            *(f"{stage}.{name}" for stage in self.config for name in _OWN & set(self.config[stage])),
        ]
        if unknown:
            raise UsageError(f"{config_path}: {printable(min(unknown))} means nothing here; leave it out")
        self.rl_tool = rl_tool or RLTrainingTool()
        self.results: dict[str, Any] = {}

    def stage1_prepare_data(self) -> None:
        """Look at the data sets that the stages will use, before anything is trained."""
        for stage, form in (("sft", "sft"), ("grpo", "rl")):
            data = {name: value for name, value in self.config[stage].items() if name in DATA}
            asked = {**data, "action": "load_dataset", "format": form}
            self.results[f"{stage}_data"] = self._asked(asked)

    def stage2_sft_training(self) -> str:
        return self._trained("sft", self.config["model"]["base_model"])

    def stage3_sft_evaluation(self, model_path: str) -> dict[str, Any]:
        return self._evaluated("sft", model_path)

    def stage4_grpo_training(self, sft_model_path: str) -> str:
        """From what sft made."""
        return self._trained("grpo", sft_model_path)

    def stage5_grpo_evaluation(self, model_path: str) -> dict[str, Any]:
        return self._evaluated("grpo", model_path)

    def run(self) -> dict[str, Any]:
        """Every stage; `results` has what each came to."""
        self.stage1_prepare_data()
        sft = self.stage2_sft_training()
        self.stage3_sft_evaluation(sft)
        grpo = self.stage4_grpo_training(sft)
        self.stage5_grpo_evaluation(grpo)
        return self.results

    def _trained(self, algorithm: str, model_name: str) -> str:
        given = {"use_lora": True, **self.config[algorithm]}
        found = self._asked({**given, "action": "train", "algorithm": algorithm, "model_name": model_name})
        self.results[f"{algorithm}_training"] = found
        return str(found["output_dir"])

    def _evaluated(self, stage: str, model_path: str) -> dict[str, Any]:
        lora = self.config[stage].get("use_lora", True)
        found = self._asked({"use_lora": lora, **self.config["eval"], "action": "evaluate", "model_path": model_path})
        self.results[f"{stage}_evaluation"] = found
        return found

    def _asked(self, parameters: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.rl_tool.run(parameters))
        if found["status"] != "success":
            raise HeadraceError(f"{parameters['action']}: {found['message']}")
        return found
