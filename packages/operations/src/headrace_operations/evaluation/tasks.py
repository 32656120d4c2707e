"""Task files, and the built-in agent that plays a task with one exact version behind the gateway."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace_operations.jobs.messages import parse_messages, parse_tools
from headrace_operations.jobs.sources import BadRow, RowFile
from headrace_schemas import Message, Tool

_PROMPT_COLUMNS = ("messages", "question", "prompt", "task")
SPLITS = ("gate", "audit")
_NAME_LENGTH_MAX = 200


@dataclass(frozen=True)
class EvaluationTask:
    """One evaluation task: its prompt, its tools and its split.

    `fields` has all columns of its row, for the metrics.
    """

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    fields: Mapping[str, Any]
    split: str


def read(path: Path) -> tuple[EvaluationTask, ...]:
    """Read the tasks in the order of the file.

    Raises:
        UsageError: a row is invalid, two tasks have the same name, or the file has no tasks.
    """
    tasks: dict[str, EvaluationTask] = {}
    if not path.is_file():
        raise UsageError(f"{path}: is not a file; name a file of tasks")
    for number, row in RowFile(path).rows():
        try:
            if isinstance(row, BadRow):
                raise row
            task = _task(row)
        except BadRow as error:
            raise UsageError(f"{path}, row {number}: {error}") from None
        if task.name in tasks:
            raise UsageError(f"{path}, row {number}: the name {task.name!r} is used twice; add the column id")
        tasks[task.name] = task
    if not tasks:
        raise UsageError(f"{path}: has no tasks")
    return tuple(tasks.values())


def splits(tasks: Sequence[EvaluationTask]) -> dict[str, list[str]]:
    """Return the names of the tasks by split, which a gate program sends to the registry.

    Raises:
        UsageError: a split has no task.
    """
    names = {split: [task.name for task in tasks if task.split == split] for split in SPLITS}
    empty = [split for split, members in names.items() if not members]
    if empty:
        raise UsageError(f'split {empty[0]!r} has no task; add tasks, or write "split": "{empty[0]}" into some rows')
    return names


def _task(row: Mapping[str, Any]) -> EvaluationTask:
    column = next((name for name in _PROMPT_COLUMNS if row.get(name)), None)
    if column is None:
        raise BadRow("format", f"a task must have one of the columns {', '.join(_PROMPT_COLUMNS)}")
    messages = parse_messages(row[column], "user", column)
    if isinstance(system := row.get("system"), str) and system.strip():
        messages = (Message(role="system", content=system), *messages)
    if messages[-1].role == "assistant":
        raise BadRow("order", "the last message is from the assistant; it must be from the user or a tool")
    name = str(row.get("id") or row.get("name") or _default_name(messages))
    split = row.get("split") or _default_split(name)
    if split not in SPLITS:
        raise BadRow("format", f"split = {split!r}: must be one of {', '.join(SPLITS)}")
    return EvaluationTask(name[:_NAME_LENGTH_MAX], messages, parse_tools(row.get("tools")), dict(row), split)


def _default_name(messages: Sequence[Message]) -> str:
    """Return a task's name: its question if that is short, so that messages can show it, otherwise a digest of it."""
    text = messages[-1].text.strip()
    if len(messages) == 1 and 0 < len(text) <= _NAME_LENGTH_MAX:
        return text
    plain = json.dumps([message.model_dump(mode="json", exclude_none=True) for message in messages], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _default_split(name: str) -> str:
    """Return the split of a task by the digest of its name: half of all tasks are in each split, in any order of the
    file.
    """
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % 2]


_TIMEOUT_S = 120.0
_TRIES, _PAUSE_S = 4, 0.5
_RETRIABLE_STATUS = (408, 409, 429, 500, 502, 503, 504)
_BODY_LENGTH_MAX = 300


@dataclass(frozen=True)
class Playthrough:
    """Transcript of an agent's attempt at an evaluation task.

    An agent that the user wrote may add `fields`, which the user's own metrics can read.
    """

    messages: Sequence[Mapping[str, Any]]
    """Messages of the model and results of tools, in the format of the OpenAI API."""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[Mapping[str, Any]]:
        return [message for message in self.messages if message.get("role") == "assistant"]

    @property
    def text(self) -> str:
        """Content of the model's last message."""
        return str(self.answers[-1].get("content") or "") if self.answers else ""

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names and arguments of all tool calls; arguments that are not JSON stay a string."""
        calls = []
        for message in self.answers:
            for call in message.get("tool_calls") or ():
                function = call.get("function", {})
                calls.append((str(function.get("name")), _parse_arguments(function.get("arguments"))))
        return calls


class ModelClient:
    """Client with which an agent calls the model during one attempt at a task.

    `seed` is for random choices of the agent.
    """

    def __init__(self, http: httpx2.Client, base_url: str, version: str, seed: int, body: Mapping[str, Any]) -> None:
        self._http = http
        self._body = body
        self.base_url = base_url
        self.version = version
        self.seed = seed

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **options: Any) -> dict[str, Any]:
        """Return the model's next message.

        Raises:
            Unreachable: the gateway does not answer.
            HeadraceError: the version does not answer, or another version answered.
        """
        body = {"model": self.version, "messages": list(messages), "seed": self.seed, **self._body, **options}
        if tools:
            body["tools"] = list(tools)
        answer = self._post(body)
        answering_version = str(answer.get("model") or "")
        if "@" in answering_version and answering_version != self.version:
            raise HeadraceError(f"{answering_version} answered a request for {self.version}")
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        for attempt in range(_TRIES):
            try:
                answer = self._http.post("/chat/completions", json=body)
            except httpx2.TransportError as error:
                if attempt + 1 == _TRIES:
                    raise Unreachable(f"{self.base_url}: {error!r}; start Headrace with `headrace up`") from error
            else:
                if answer.status_code == 200:
                    body_json: dict[str, Any] = answer.json()
                    return body_json
                if answer.status_code not in _RETRIABLE_STATUS or attempt + 1 == _TRIES:
                    error_text = answer.text[:_BODY_LENGTH_MAX]
                    raise HeadraceError(
                        f"{self.version}: does not answer ({answer.status_code}: {error_text}); serve it with "
                        f"`headrace models serve {self.version}`"
                    )
            time.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


Agent = Callable[[EvaluationTask, ModelClient], object]
"""A custom agent. It returns a `Playthrough`, messages, or a text."""


def connection(base_url: str, key: str | None) -> httpx2.Client:
    """Open a client whose requests are evaluation traffic, which is never trained. The caller must close it."""
    headers = {"X-Headrace-Purpose": "eval", **({"Authorization": f"Bearer {key}"} if key else {})}
    return httpx2.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)


def simple_agent(calls_max: int) -> Agent:
    """Return an agent that answers tool calls from the task's own `tool_results`, in at most `calls_max` model
    calls."""

    def play(task: EvaluationTask, model: ModelClient) -> Playthrough:
        messages = [message.model_dump(mode="json", exclude_none=True) for message in task.messages]
        tools = [tool.model_dump(mode="json", exclude_none=True) for tool in task.tools]
        prompt_length = len(messages)
        results = task.fields.get("tool_results")
        for _ in range(calls_max):
            answer = {name: value for name, value in model.chat(messages, tools).items() if value is not None}
            messages.append({"role": "assistant", "content": "", **answer})
            calls = answer.get("tool_calls") or []
            if not calls or results is None:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.get("id"), "content": _tool_result(results, call)}
                for call in calls
            ]
        return Playthrough(messages[prompt_length:])

    return play


def _tool_result(results: Any, call: Mapping[str, Any]) -> str:
    """Return the result that the task defines for a tool call, looked up by name and arguments, otherwise by name."""
    function = call.get("function", {})
    name, arguments = str(function.get("name")), _parse_arguments(function.get("arguments"))
    result = results.get(name) if isinstance(results, Mapping) else None
    if isinstance(result, Mapping):
        result = result.get(json.dumps(arguments, sort_keys=True), result.get("*"))
    return "there is nothing" if result is None else result if isinstance(result, str) else json.dumps(result)


def _parse_arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
