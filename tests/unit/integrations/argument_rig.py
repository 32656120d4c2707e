"""Adapters with recorded effects: settings, steps, model calls, feedback, files, output and warnings.

Two runs that differ in one argument are compared. Equal effects mean that the adapter ignored the argument.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace.tuner import JudgeOutput, WorkflowOutput
from headrace_integrations.evaluation.evaluating import EvaluatedVersion, MetricMean
from headrace_integrations.practice.runs import Run
from headrace_integrations.practice.training import Step, play_all
from headrace_integrations.stack.connection import ENTERED
from tests.unit.integrations.adapter_rig import VERSION, RecordingGatewayStack

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
    """Adapters on one `RecordingStack`. `played(work)` returns the effects of `work` as text."""

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
    """Return a folder `name` with files train.jsonl and test.jsonl."""
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
    """Return the part of dspy that `tune_prompt` uses."""
    dspy: Any = ModuleType("dspy")

    class Search:
        """Search that records its options and returns the initial prompt."""

        def __init__(self, **options: Any) -> None:
            note("search", {name: value for name, value in options.items() if name != "metric"})

        def compile(self, module: Any, trainset: Any) -> Any:
            note("trainset", [example.task for example in trainset])
            return module

    class Example:
        """A row."""

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
