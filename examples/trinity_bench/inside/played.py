"""Trinity workflow of one play: it runs the user's own workflow with the exact version and writes the score."""

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
"""Key of this workflow's arguments in the taskset's `workflow_args`; all others are the user's."""


class Played(Workflow):  # type: ignore[misc]
    """Workflow that writes its score, or its error, to the file that the taskset names.

    The workflow writes before it returns to Trinity, because Trinity itself reports only a mean over the successful
    tasks.
    """

    is_async = True

    async def run_async(self) -> list[Any]:
        arguments = dict(self.task.workflow_args)
        bench_arguments = arguments.pop(ARGUMENT)
        line: dict[str, object] = {"play": json.loads(self.task.raw_task["play"])}
        timeout_s = bench_arguments["timeout_s"]
        bound = asyncio.timeout(timeout_s)
        try:
            async with bound:
                experiences = await self._run(bench_arguments["workflow"], arguments, line["play"])
            line["score"] = _score(experiences, bench_arguments["metric"])
        except BaseException as error:
            late = f"did not end within play_timeout_s = {timeout_s:g}"
            line["error"] = late if bound.expired() else f"{type(error).__name__}: {error}"
            raise
        finally:
            _append(bench_arguments["results"], line)
        return experiences

    async def _run(self, name: str, arguments: dict[str, Any], play: Any) -> list[Any]:
        task = replace(self.task, raw_task=json.loads(self.task.raw_task["row"]), workflow_args=arguments)
        model = GatewayModel(self.model.config, play["seed"], f"bench-{uuid.uuid4().hex}")
        workflow = WORKFLOWS.get(name)(task=task, model=model, auxiliary_models=self.auxiliary_model_wrappers)
        if workflow.repeatable:
            workflow.set_repeat_times(1, 0)
        experiences: list[Any]
        if workflow.asynchronous:
            experiences = await workflow.run_async()
        else:
            experiences = await asyncio.to_thread(workflow.run)
        return experiences


def _score(experiences: list[Any], metric: str) -> float:
    """Return the score of the run, which is in its last experience. Raises `ValueError` if there is none."""
    if not experiences:
        raise ValueError("the workflow returned no experience")
    last = experiences[-1]
    score = (last.metrics or {}).get(metric) if metric else last.reward
    if score is None:
        names = sorted(last.metrics or {})
        raise ValueError(f"its last experience has no {metric or 'reward'}; its metrics are {names}")
    return float(score)


def _append(path: str, line: object) -> None:
    """Append a line in a single write, so that lines of several processes do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)
