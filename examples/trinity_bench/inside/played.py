"""Parts of one play in Trinity's own environment: the user's workflow with the exact version, and the actor of the
external model.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
from trinity.common.models.allocator import Allocator
from trinity.common.models.experience_extraction import convert_api_output_to_experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows import WORKFLOWS
from trinity.common.workflows.workflow import Workflow
from trinity.utils.monitor import TensorboardMonitor

BASE_URL = "HEADRACE_BENCH_URL"
"""Environment variable that the YAML names (`model.external_model`), with the address without /v1."""
_SEEDS = 2**31
_TURNS_MAX = 1024
ARGUMENT = "headrace_bench"
"""Key of this workflow's arguments in the taskset's `workflow_args`; all others are the user's."""


class Monitor(TensorboardMonitor):  # type: ignore[misc]
    """Trinity's monitor, which also creates the actor. Trinity creates its monitor in the explorer's process before the
    runners.
    """

    def __init__(self, project: str, group: str, name: str, role: str, config: Any) -> None:
        super().__init__(project, group, name, role, config)
        actor = Allocator(config.explorer).get_actor_name("rollout", 0, 0)
        options = {"name": actor, "namespace": config.ray_namespace, "num_cpus": 0}
        self._model = ray.remote(_Model).options(**options).remote()


class _Model:
    """Actor with the methods that runners and explorer call. Workflows call the gateway themselves."""

    def get_model_version(self) -> int:
        """Return 0, because Trinity counts steps while the version is part of the model's name."""
        return 0

    def get_api_server_url(self) -> str:
        return os.environ[BASE_URL]

    def shutdown(self) -> None:
        """Do nothing, because the actor owns no resources."""


class GatewayModel(ModelWrapper):  # type: ignore[misc]
    """Model of one play. `chat` and `chat_async`, which normally call Trinity's engines, send chat completions."""

    def __init__(self, config: Any, seed: int, session: str) -> None:
        super().__init__(models=[], config=config, api_address=os.environ[BASE_URL].rstrip("/"))
        self._api_key = os.environ.get("OPENAI_API_KEY", "none")
        self._seeds = itertools.count(seed * _TURNS_MAX)
        self._headers = {"X-Headrace-Purpose": "eval", "X-Session-Id": session}

    def get_openai_client(self) -> Any:
        if self.openai_client is None:
            _steer(super().get_openai_client(), self._seeds, self._headers)
        return super().get_openai_client()

    def get_openai_async_client(self) -> Any:
        if self.openai_async_client is None:
            _steer(super().get_openai_async_client(), self._seeds, self._headers)
        return super().get_openai_async_client()

    def chat(self, messages: list[dict[str, Any]], **sampling: Any) -> list[Any]:
        completions = self.get_openai_client().chat.completions
        answer = completions.create(model=self.model_path, messages=messages, **self._fields(sampling))
        experiences: list[Any] = convert_api_output_to_experience(answer)
        return experiences

    async def chat_async(self, messages: list[dict[str, Any]], **sampling: Any) -> list[Any]:
        completions = self.get_openai_async_client().chat.completions
        answer = await completions.create(model=self.model_path, messages=messages, **self._fields(sampling))
        experiences: list[Any] = convert_api_output_to_experience(answer)
        return experiences

    def _fields(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return request fields for Trinity's sampling arguments, which are those of vLLM."""
        arguments = {**self.generate_kwargs, **{name: value for name, value in sampling.items() if value is not None}}
        fields = {
            name: arguments[name] for name in ("temperature", "top_p", "max_tokens", "n", "stop") if name in arguments
        }
        extra = dict(arguments.get("extra_body", {}))
        if arguments.get("top_k", -1) > 0:
            extra["top_k"] = arguments["top_k"]
        return {**fields, "extra_body": extra}


def _steer(client: Any, seeds: Iterator[int], headers: Mapping[str, str]) -> None:
    """Give each completion of `client` the next seed, unless it has one, and the headers of the play."""
    create = client.chat.completions.create

    def steered(*args: Any, **fields: Any) -> Any:
        all_headers = {**headers, **(fields.pop("extra_headers", None) or {})}
        return create(*args, **{"seed": next(seeds) % _SEEDS, **fields, "extra_headers": all_headers})

    client.chat.completions.create = steered


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
