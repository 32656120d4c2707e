"""Trinity's workflow of one play: the user's own workflow, asked of the exact version, and a line with its score."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from dataclasses import replace
from typing import Any

from trinity.common.workflows import WORKFLOWS
from trinity.common.workflows.workflow import Workflow

from trinity_bench.inside.gateway_model import GatewayModel

ARGUMENT = "headrace_bench"
"""Our key in the taskset's `workflow_args`; the rest of them are the user's."""


class Played(Workflow):  # type: ignore[misc]
    """Writes its score, or why there is none, to the file that the taskset names, before Trinity hears of it: what
    Trinity reports itself is a mean over the tasks that did not fail."""

    is_async = True

    async def run_async(self) -> list[Any]:
        arguments = dict(self.task.workflow_args)
        ours = arguments.pop(ARGUMENT)
        line: dict[str, object] = {"play": json.loads(self.task.raw_task["play"])}
        timeout_s = ours["timeout_s"]
        bound = asyncio.timeout(timeout_s)
        try:
            async with bound:
                experiences = await self._run(ours["workflow"], arguments, line["play"])
            line["score"] = _score(experiences, ours["metric"])
        except BaseException as error:
            late = f"was not over within play_timeout_s = {timeout_s:g}"
            line["error"] = late if bound.expired() else f"{type(error).__name__}: {error}"
            raise
        finally:
            _append(ours["results"], line)
        return experiences

    async def _run(self, name: str, arguments: dict[str, Any], play: Any) -> list[Any]:
        task = replace(self.task, raw_task=json.loads(self.task.raw_task["row"]), workflow_args=arguments)
        model = GatewayModel(self.model.config, play["seed"], f"bench-{uuid.uuid4().hex}")
        workflow = WORKFLOWS.get(name)(task=task, model=model, auxiliary_models=self.auxiliary_model_wrappers)
        if workflow.repeatable:
            workflow.set_repeat_times(1, 0)
        found: list[Any]
        if workflow.asynchronous:
            found = await workflow.run_async()
        else:
            found = await asyncio.to_thread(workflow.run)
        return found


def _score(experiences: list[Any], metric: str) -> float:
    """The run's: its last experience has the reward. Raises `ValueError` where there is none."""
    if not experiences:
        raise ValueError("the workflow has returned no experience")
    last = experiences[-1]
    found = (last.metrics or {}).get(metric) if metric else last.reward
    if found is None:
        names = sorted(last.metrics or {})
        raise ValueError(f"its last experience has no {metric or 'reward'}; its metrics are {names}")
    return float(found)


def _append(path: str, line: object) -> None:
    """One write, so that lines of several processes stay whole."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)
