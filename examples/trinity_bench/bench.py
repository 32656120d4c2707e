"""One bench: `trinity run` in mode `bench`, with a version behind a gateway as its external model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PLUGINS = Path(__file__).parent / "plugins"
STAND_INS = Path(__file__).parent / "stand_ins"
_SCORED = "headrace_scored"
_SAID_BYTES = 2000


class BenchFailed(Exception):
    """Some play has no score. The message has the end of what Trinity said."""


@dataclass(frozen=True)
class Bench:
    """How Trinity is run."""

    trinity: Path
    """The program `trinity`, in its own environment."""
    base_url: str
    """The gateway's, with or without `/v1`."""
    workflow: str
    workflows: Path
    """A folder of modules that announce workflows."""
    ray_address: str
    context_tokens: int = 4096
    answer_tokens: int = 512
    at_once: int = 4
    timeout_s: float = 1800.0

    def scores(self, folder: Path, version: str, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """What the workflow gives for each row, in their order. `folder` is empty; blocks. Raises `BenchFailed`."""
        tasks = folder / "tasks" / "rows.jsonl"
        tasks.parent.mkdir()
        numbered = [json.dumps({**row, "play": number}) for number, row in enumerate(rows)]
        tasks.write_text("\n".join(numbered) + "\n", encoding="utf-8")
        (folder / "bench.yaml").write_text(yaml.safe_dump(self._configuration(folder, version, len(rows))))
        with (folder / "log").open("wb") as log:
            command = [str(self.trinity), "run", "--config", str(folder / "bench.yaml")]
            try:
                subprocess.run(
                    command, env=self._environment(), stdout=log, stderr=log, timeout=self.timeout_s, check=False
                )
            except subprocess.TimeoutExpired:
                raise BenchFailed(f"Trinity has not ended within {self.timeout_s:g} s: {_said(folder)}") from None
        found = _scores(folder / "scores.jsonl")  # Trinity ends with 0 whatever happened
        missing = len(rows) - len(found)
        if missing:
            raise BenchFailed(f"{missing} of {len(rows)} plays have no score: {_said(folder)}")
        return [found[number] for number in range(len(rows))]

    def _environment(self) -> dict[str, str]:
        return trinity_environment(self.trinity) | {
            "RAY_ADDRESS": self.ray_address,
            "OPENAI_BASE_URL": self.base_url.rstrip("/").removesuffix("/v1"),  # Trinity adds it
            "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", "none"),
            "TRINITY_PLUGIN_DIRS": os.pathsep.join(map(str, (PLUGINS, self.workflows))),
        }

    def _configuration(self, folder: Path, version: str, rows: int) -> dict[str, Any]:
        return {
            "mode": "bench",
            "project": "headrace",
            "name": "bench",
            "ray_namespace": folder.name,
            "checkpoint_root_dir": str(folder / "trinity"),
            "model": {
                "model_path": version,  # what workflows send as `model`
                "max_model_len": self.context_tokens,
                "max_response_tokens": self.answer_tokens,
                "external_model": {"enable": True, "model_name": version},
            },
            "buffer": {
                "batch_size": min(rows, self.at_once),
                "explorer_input": {
                    "eval_tasksets": [
                        {
                            "name": "plays",
                            "storage_type": "file",
                            "path": str(folder / "tasks"),
                            "default_workflow_type": _SCORED,
                            "workflow_args": {"inner": self.workflow, "scores": str(folder / "scores.jsonl")},
                        }
                    ]
                },
            },
            "explorer": {
                "eval_on_startup": True,
                "runner_per_model": min(rows, self.at_once),
                "rollout_model": {"engine_type": "external", "enable_openai_api": True},
            },
            "synchronizer": {"sync_method": "checkpoint"},
            "cluster": {"ray_address": self.ray_address, "node_num": 1, "gpu_per_node": 1},  # it uses none of them
            "monitor": {"monitor_type": "tensorboard"},
        }


def trinity_environment(program: Path) -> dict[str, str]:
    """Of processes of Trinity's, and of the Ray cluster that they run on."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not any(program.parents[1].glob("lib/python*/site-packages/vllm")):
        found["PYTHONPATH"] = str(STAND_INS)
    found["HF_HUB_OFFLINE"] = "1"
    return found | {"PATH": f"{program.parent}{os.pathsep}{found.get('PATH', '')}"}


def _scores(path: Path) -> dict[int, float]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["play"]: line["score"] for line in map(json.loads, lines)}


def _said(folder: Path) -> str:
    return (folder / "log").read_bytes()[-_SAID_BYTES:].decode(errors="replace").strip()
