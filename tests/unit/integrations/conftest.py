"""Fixtures for adapters without services: stand-ins for gateway, model and bus that record settings, calls, feedback,
files, output and warnings.

Two runs that differ in one argument are compared. Equal effects mean that the adapter ignored the argument.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest

from headrace import AsyncClient, Client
from headrace.errors import HeadraceError
from headrace.stack import Addresses, Stack
from headrace.topics import Entry, Range
from headrace.tuner import JudgeOutput, WorkflowOutput
from headrace_integrations.evaluation import EvaluatedVersion, MetricMean
from headrace_integrations.practice.runs import Run
from headrace_integrations.practice.training import Step, play_all
from headrace_integrations.stack.connection import ENTERED
from headrace_schemas import Event

VERSION = "tiny@0123456789abcdef"


class Gateway:
    """Gateway that accepts and records every request."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.posted.append((request.url.path, json.loads(request.content) if request.content else {}))
        return httpx2.Response(202, json={"event_ids": []})

    @property
    def values(self) -> list[float]:
        """Return the values of all recorded feedback."""
        return [body["value"] for path, body in self.posted if path == "/v1/feedback" and "value" in body]

    @property
    def ended(self) -> int:
        return sum(path.endswith("/end") for path, _ in self.posted)


class RecordingGatewayStack(Stack):
    """Stack with only a recording gateway. Its models always answer `answer`."""

    def __init__(self, answer: str = "it is 4", settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(Addresses("http://gateway"), "tiny")
        self.gateway, self.answer = Gateway(), answer
        self.settings_table = {"trainer.batch_experiences": 4, "trainer.compute.device": "cpu", **(settings or {})}
        self.clients: list[Mapping[str, str]] = []
        self.__dict__["client"] = Client("http://gateway", transport=httpx2.MockTransport(self.gateway))

    def async_client(self) -> AsyncClient:
        return AsyncClient("http://gateway", transport=httpx2.MockTransport(self.gateway))

    def openai(self, headers: Mapping[str, str], *, blocking: bool = False) -> Any:
        self.clients.append(dict(headers))
        return fake_client(self.answer, blocking=blocking)

    def settings(self) -> dict[str, Any]:
        return self.settings_table

    def serving(self, name: str | None = None) -> str | None:
        return VERSION

    async def hold(self, version: str, timeout_s: float = 120.0) -> None: ...


def fake_client(answer: str, *, blocking: bool) -> Any:
    """Return the part of an OpenAI client that the tests use."""
    message = SimpleNamespace(content=answer, tool_calls=None)
    usage = SimpleNamespace(prompt_tokens=3, completion_tokens=2)
    completion = SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage)

    async def create(**_: Any) -> Any:
        return completion

    async def close() -> None: ...

    completions = SimpleNamespace(create=(lambda **_: completion) if blocking else create)
    return SimpleNamespace(chat=SimpleNamespace(completions=completions), close=(lambda: None) if blocking else close)


async def train_once(
    stack: RecordingGatewayStack, tasks: Sequence[Any], play: Any, *, group_size: int = 1, **_: Any
) -> AsyncIterator[Step]:
    """Play each task once without training, as a replacement of `train_on_tasks`."""
    client = stack.async_client()
    runs = [Run(stack, client, task, purpose="train", model=stack.model) for task in tasks for _ in range(group_size)]
    await play_all(runs, play, 4)
    yield Step(1, tuple(runs), trained=0, champion=VERSION)


def entering(stack: RecordingGatewayStack) -> Any:
    """Return a replacement of `stack_for` that yields `stack`."""

    @contextmanager
    def stack_for(*_: Any, **__: Any) -> Any:
        yield stack

    return stack_for


class Bus:
    """In-memory topics with one partition each, as a replacement of `connected`."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}

    def add(self, *events: Event) -> None:
        for event in events:
            self.events.setdefault(event.topic, []).append(event)

    @asynccontextmanager
    async def connected(self, _address: str) -> AsyncIterator[Bus]:
        yield self

    async def ends(self, topics: Sequence[str]) -> dict[str, dict[int, int]]:
        return {topic: {0: len(self.events.get(topic, []))} for topic in topics}

    async def read(self, selection: Range, _progress: Any = None, ends: Mapping[int, int] | None = None) -> Any:
        for offset, event in enumerate(self.events.get(selection.topic, [])):
            inside = (selection.from_offset or 0) <= offset < (ends or {}).get(0, 10**9)
            if inside and (not selection.keys or event.key in selection.keys):
                yield Entry(selection.topic, 0, offset, datetime.now(UTC), event.key, event)

    async def records(self, selection: Range, _progress: Any = None, ends: Mapping[int, int] | None = None) -> Any:
        async for entry in self.read(selection, ends=ends):
            yield SimpleNamespace(key=entry.key.encode())


ROWS = [{"question": f"{n} + 1", "answer": f"{n + 1}"} for n in range(4)]


class RecordingStack(RecordingGatewayStack):
    """Stack that records the calls of its models."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__("one line\nit is 4", settings)
        self.seen: list[object] = []
        self._first = {
            **self.settings_table,
            "trainer.lora.rank": 0,
            "trainer.lora.alpha": 1.0,
            "trainer.lora.targets": [],
        }
        self.forget()

    def forget(self) -> None:
        """Reset the settings to their initial values."""
        self.settings_table.clear()
        self.settings_table |= self._first

    def openai(self, headers: Mapping[str, str], *, blocking: bool = False) -> Any:
        client = super().openai({}, blocking=blocking)
        create = client.chat.completions.create
        purpose = headers.get("X-Headrace-Purpose")

        def noting(**options: Any) -> Any:
            self.seen.append(("call", purpose, {name: value for name, value in options.items() if name != "messages"}))
            return create(**options)

        client.chat.completions.create = noting
        return client


class Rig:
    """Runner of adapters on one `RecordingStack`. `played(work)` returns the effects of `work` as text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.stack, self._folder, self._caplog = RecordingStack(), folder, caplog
        for module in ("tuner.tuning", "hello_agents.tool", "rl.training", "judging"):
            monkeypatch.setattr(f"headrace_integrations.{module}.stack_for", self._stack_for)
        for module in ("tuner.tuning", "hello_agents.tool", "scenarios.maths", "trinity.workflows"):
            monkeypatch.setattr(f"headrace_integrations.{module}.train_on_tasks", self._train_on_tasks)
        for module in ("tuner.tuning", "hello_agents.tool"):
            monkeypatch.setattr(f"headrace_integrations.{module}.evaluate", self._evaluate)
        monkeypatch.setattr(
            "headrace_integrations.hello_agents.tool.write", lambda *words: self.note("written", words[1:])
        )
        monkeypatch.setattr("headrace_integrations.hello_agents.tool.train_rows", self._train_rows)
        monkeypatch.setattr("headrace_integrations.judging.train_rows", self._train_rows)

    def note(self, *words: object) -> None:
        self.stack.seen.append(words)

    def played(self, work: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
        """Return all effects of `work`, and its result, with times and new ids replaced."""
        self.stack.seen.clear()
        self.stack.gateway.posted.clear()
        self._caplog.clear()
        capsys.readouterr()
        before = set(self._folder.rglob("*"))
        result = work()
        files = sorted(
            (str(path.relative_to(self._folder)), path.read_text() if path.is_file() else "")
            for path in set(self._folder.rglob("*")) - before
        )
        warned = [record.getMessage() for record in self._caplog.records if record.levelname == "WARNING"]
        effects = sorted(map(repr, self.stack.seen))
        written = capsys.readouterr()
        effects_text = json.dumps(
            [effects, self.stack.gateway.posted, files, warned, written.out, written.err, repr(result)], default=repr
        )
        return re.sub(r"0x[0-9a-f]+|[0-9a-f]{32}|Experiment-\d+|session-[0-9a-f-]+", "-", effects_text)

    @contextmanager
    def _stack_for(self, *words: Any, **named: Any) -> Iterator[RecordingStack]:
        self.note("stack", words, named)
        settings = words[1] if len(words) > 1 else {}
        self.stack.settings_table |= {name: value for name, value in settings.items() if name.startswith("trainer.")}
        token = ENTERED.set(self.stack)
        try:
            yield self.stack
        finally:
            ENTERED.reset(token)

    async def _train_on_tasks(self, stack: Any, tasks: Sequence[Any], play: Any, **sizes: Any) -> AsyncIterator[Step]:
        """Play each task once without training."""
        self.note("steps", list(tasks), sizes)
        for number in range(1, sizes.get("steps", 1) + 1):
            client = self.stack.async_client()
            chosen = tasks if number == 1 else ()
            runs = [Run(stack, client, task, purpose="train", model=stack.model) for task in chosen]
            await play_all(runs, play, 1)
            self.note("errors", [run.error for run in runs if run.error])
            yield Step(number, tuple(runs), trained=0, champion=VERSION)

    async def _evaluate(self, _stack: Any, tasks: Sequence[Any], play: Any, metrics: Any) -> EvaluatedVersion:
        self.note("evaluated", list(tasks), sorted(metrics))
        client = self.stack.async_client()
        runs = [Run(self.stack, client, task, purpose="eval", model="tiny", needs_reward=False) for task in tasks]
        await play_all(runs, play, 1)
        return EvaluatedVersion(VERSION, {name: MetricMean(1.0, None, 1) for name in metrics}, 1, ())

    def _train_rows(self, _stack: Any, kind: str, rows: Any, **options: Any) -> str:
        self.note("rows", kind, list(rows), options)
        return VERSION


def write_rows(folder: Path, name: str, count: int = 4) -> Path:
    """Write `train.jsonl` and `test.jsonl` with `count` rows, and return their folder."""
    (folder / name).mkdir(exist_ok=True)
    for split, rows in (("train", ROWS[:count]), ("test", ROWS[:1])):
        text = "".join(json.dumps({**row, "of": name}) + "\n" for row in rows)
        (folder / name / f"{split}.jsonl").write_text(text)
    return folder / name


async def workflow(
    task: dict[str, Any], model: Any, auxiliary_models: Mapping[str, Any] | None = None
) -> WorkflowOutput:
    messages = [{"role": "user", "content": task["question"]}]
    for partner in (auxiliary_models or {}).values():
        await partner(messages)
    return WorkflowOutput(response=await model(messages), reward=0.5)


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=1.0 if task["answer"] in str(response) else 0.25)


def fake_dspy(note: Callable[..., None]) -> ModuleType:
    """Return a module with the part of dspy that `tune_prompt` uses."""
    dspy: Any = ModuleType("dspy")

    class Search:
        """Optimizer that records its options and returns the initial prompt."""

        def __init__(self, **options: Any) -> None:
            note("search", {name: value for name, value in options.items() if name != "metric"})

        def compile(self, module: Any, trainset: Any) -> Any:
            note("trainset", [example.task for example in trainset])
            return module

    class Example:
        """Stand-in for `dspy.Example`, which holds one row of a training set."""

        def __init__(self, task: Any) -> None:
            self.task = task

        def with_inputs(self, *_: str) -> Any:
            return self

    dspy.Module = object
    dspy.Signature = lambda _shape, prompt: SimpleNamespace(instructions=prompt)
    dspy.Predict = lambda signature: SimpleNamespace(signature=signature)
    dspy.Prediction, dspy.LM, dspy.MIPROv2, dspy.Example = SimpleNamespace, lambda name: name, Search, Example
    sys.modules["dspy"] = dspy
    module: ModuleType = dspy
    return module


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Rig:
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "other"):
        write_rows(tmp_path, name, 4 if name == "rows" else 3)
    return Rig(monkeypatch, tmp_path, caplog)


@pytest.fixture
def compare(rig: Rig, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Return a check that `changed` has other effects than `plain`, or is refused with a message that names the
    argument."""

    def compare(name: str, plain: Callable[[], object], changed: Callable[[], object]) -> None:
        before = rig.played(plain, capsys)
        rig.stack.forget()
        refusal = None
        try:
            after = rig.played(changed, capsys)
        except (HeadraceError, TypeError, ValueError) as error:
            refusal = str(error)
        if refusal is None:
            assert after != before, f"{name} is read and ignored"
            return
        assert name.rpartition(".")[2] in refusal, f"the refusal of {name} does not name it: {refusal}"
        assert refusal.isprintable()
        assert len(refusal) < 1_000

    return compare
