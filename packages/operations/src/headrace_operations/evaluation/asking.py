"""Asks one exact version through the gateway, and plays a task with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from headrace.errors import HeadraceError, Unreachable
from headrace_operations.evaluation.tasks import EvaluationTask

_TIMEOUT_S = 120.0
_TRIES, _PAUSE_S = 4, 0.5
_BUSY = (408, 409, 429, 500, 502, 503, 504)
_SAID_MAX = 300


@dataclass(frozen=True)
class Playthrough:
    """What came of playing a task. An agent of yours may add `fields` for metrics of yours."""

    messages: Sequence[Mapping[str, Any]]
    """What the model and the tools said, in the form of the OpenAI API."""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[Mapping[str, Any]]:
        return [one for one in self.messages if one.get("role") == "assistant"]

    @property
    def text(self) -> str:
        """The last thing that the model said."""
        return str(self.answers[-1].get("content") or "") if self.answers else ""

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names and arguments of all tool calls; arguments that are no JSON stay a text."""
        found = []
        for message in self.answers:
            for call in message.get("tool_calls") or ():
                function = call.get("function", {})
                found.append((str(function.get("name")), _parsed(function.get("arguments"))))
        return found


class Asking:
    """What an agent asks the model with. It is for one play; `seed` is for whatever the agent draws."""

    def __init__(self, http: httpx2.Client, base_url: str, version: str, seed: int, body: Mapping[str, Any]) -> None:
        self._http = http
        self._body = body
        self.base_url = base_url
        self.version = version
        self.seed = seed

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """The model's message. Raises `Unreachable`, `HeadraceError` when the version does not answer or another one
        did."""
        body = {"model": self.version, "messages": list(messages), "seed": self.seed, **self._body, **more}
        if tools:
            body["tools"] = list(tools)
        answer = self._posted(body)
        told = str(answer.get("model") or "")
        if "@" in told and told != self.version:
            raise HeadraceError(f"{told} answered, and {self.version} was asked")
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def _posted(self, body: Mapping[str, Any]) -> dict[str, Any]:
        for attempt in range(_TRIES):
            try:
                answer = self._http.post("/chat/completions", json=body)
            except httpx2.TransportError as error:
                if attempt + 1 == _TRIES:
                    raise Unreachable(f"{self.base_url}: {error!r}; is Headrace running?") from error
            else:
                if answer.status_code == 200:
                    found: dict[str, Any] = answer.json()
                    return found
                if answer.status_code not in _BUSY or attempt + 1 == _TRIES:
                    said = answer.text[:_SAID_MAX]
                    raise HeadraceError(
                        f"{self.version} does not answer ({answer.status_code}): {said}; is it served? "
                        f"headrace models serve {self.version}"
                    )
            time.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("the last try returns or raises")


Agent = Callable[[EvaluationTask, Asking], object]
"""Of anybody: it returns a `Playthrough`, messages, or a text."""


def connection(base_url: str, key: str | None) -> httpx2.Client:
    """As evaluation traffic: nothing of it is trained."""
    headers = {"X-Headrace-Purpose": "eval", **({"Authorization": f"Bearer {key}"} if key else {})}
    return httpx2.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)


def simple_agent(calls_max: int) -> Agent:
    """Asks, answers tool calls with what the task's own `tool_results` say, and asks again, so many times at most."""

    def play(task: EvaluationTask, asking: Asking) -> Playthrough:
        messages = [one.model_dump(mode="json", exclude_none=True) for one in task.messages]
        offered = [tool.model_dump(mode="json", exclude_none=True) for tool in task.tools]
        given = len(messages)
        results = task.fields.get("tool_results")
        for _ in range(calls_max):
            answer = {name: value for name, value in asking.chat(messages, offered).items() if value is not None}
            messages.append({"role": "assistant", "content": "", **answer})
            calls = answer.get("tool_calls") or []
            if not calls or results is None:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.get("id"), "content": _result(results, call)} for call in calls
            ]
        return Playthrough(messages[given:])

    return play


def _result(results: Any, call: Mapping[str, Any]) -> str:
    """What the task says that this call brings: by name and arguments, else by name."""
    function = call.get("function", {})
    name, arguments = str(function.get("name")), _parsed(function.get("arguments"))
    found = results.get(name) if isinstance(results, Mapping) else None
    if isinstance(found, Mapping):
        found = found.get(json.dumps(arguments, sort_keys=True), found.get("*"))
    return "there is nothing" if found is None else found if isinstance(found, str) else json.dumps(found)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
