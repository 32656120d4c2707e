"""What Trinity-RFT loads in its own environment (`trinity run --plugin-dir`): a workflow that runs another one and
writes down what it was worth, and the actor that Trinity 0.6.0 looks for and that an external model does not have.

Nothing of Headrace is imported here.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import ray
from trinity.common.workflows import WORKFLOWS, Task, Workflow

NAME = "headrace_scored"
_ACTOR = "benchmark_rollout_model_0_0"
"""As `Allocator.get_actor_name` has it of the only engine of a bench."""


class Gateway:
    """In the place of an engine's actor: it is asked where its API is, and for nothing else."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get_api_server_url(self) -> str:
        return self._url


@WORKFLOWS.register_module(NAME)
class Scored(Workflow):  # type: ignore[misc, unused-ignore]
    """Runs the workflow that `workflow_args` name as `inner`, with a client whose calls are evaluation, and adds a line
    with the play's number and the mean of its rewards to the file `scores`. A run that fails writes none."""

    is_async = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Sequence[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        inner = WORKFLOWS.get(task.workflow_args["inner"])
        if inner is None:
            raise ValueError(f"there is no workflow {task.workflow_args['inner']!r}")
        key, headers = os.environ.get("OPENAI_API_KEY") or "none", {"X-Headrace-Purpose": "eval"}
        base_url = f"{os.environ['OPENAI_BASE_URL']}/v1"
        model.openai_client = openai.OpenAI(base_url=base_url, api_key=key, default_headers=headers)
        model.openai_async_client = openai.AsyncOpenAI(base_url=base_url, api_key=key, default_headers=headers)
        self._inner = inner(task=task, model=model, auxiliary_models=auxiliary_models)

    async def run_async(self) -> list[Any]:
        """Raises what the inner workflow raises, and `ValueError` for a reward that is none."""
        found: list[Any] = await (
            self._inner.run_async() if self._inner.asynchronous else asyncio.to_thread(self._inner.run)
        )
        rewards = [one.reward for one in found]
        if not rewards or any(reward is None or not math.isfinite(reward) for reward in rewards):
            raise ValueError(f"the workflow has given the rewards {rewards}")
        line = {"play": self.task.raw_task["play"], "score": math.fsum(rewards) / len(rewards)}
        _append(Path(self.task.workflow_args["scores"]), json.dumps(line) + "\n")
        return found


def _append(path: Path, line: str) -> None:
    """Several processes write to it, a line at a time."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _stand_in() -> Any:
    """Trinity's runners look for an actor of each engine by its name, and of an external model there is none. Lives as
    long as the process that has made it."""
    return (
        ray.remote(Gateway)
        .options(name=_ACTOR, namespace=ray.get_runtime_context().namespace, get_if_exists=True, num_cpus=0)
        .remote(os.environ["OPENAI_BASE_URL"])
    )


GATEWAY = _stand_in() if ray.is_initialized() else None
