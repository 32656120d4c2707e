"""AgentScope Java's training extension as Python agents have it: replayed calls of copies, and their training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.blocking import blocking
from headrace.shadow import (
    ExplicitMarkingStrategy,
    HeadraceSink,
    SamplingRateStrategy,
    SelectionStrategy,
    TrainingCopy,
    TrainingRunner,
    TrajectorySink,
    TrinitySink,
    mark,
    read_only,
)
from tests.parity.stage import Stage, program
from tests.support.java_agent import trained_runs

_TRAINED_S = 60.0


@read_only
def look_up(order: str) -> str:
    return f"{order} is on its way"


def cancel(order: str) -> str:
    raise AssertionError(f"a copy cancelled {order}")


def make_agent(copy: TrainingCopy) -> Callable[[str], str]:
    """Look the order up, ask the model, and cancel the order on request."""
    client, tools = copy.openai(blocking=True), copy.tools({"look_up": look_up, "cancel": cancel})

    def ask(text: str) -> str:
        tools["cancel" if "cancel" in text else "look_up"](text)
        messages: Any = [{"role": "user", "content": text}]
        completion = client.chat.completions.create(model=copy.model, messages=messages, max_tokens=6)
        return completion.choices[0].message.content or ""

    return ask


def run_requests(
    sink: TrajectorySink, selection: SelectionStrategy, repeat: int, requests: dict[str, str | None]
) -> TrainingRunner:
    """Play users, some of them in a marked task. A production model outside the stack answers them."""
    runner = TrainingRunner(sink, make_agent, lambda copy: len(copy.answer) / 10, selection=selection, repeat=repeat)
    with runner:
        ask = runner.watched(lambda text: f"served {text}")
        for text, task in requests.items():
            if task is None:
                assert ask(text) == f"served {text}"
            else:
                with mark("user-feedback", task_id=task):
                    assert ask(text) == f"served {text}"
    return runner


@program("copies")
def copies(stage: Stage) -> None:
    stack, everything = stage.stack, SamplingRateStrategy(1.0)
    sampled = {f"order {number}?": f"sampled-{number}" for number in range(2)}
    runner = run_requests(HeadraceSink(stack), everything, 4, {**sampled, "cancel order 2": "written"})
    assert (runner.counts.rewarded, runner.counts.refused) == (8, 4), runner.last_error
    marks = {"order 3?": "marked-3", "order 4?": None}
    assert run_requests(HeadraceSink(stack), ExplicitMarkingStrategy("user-feedback"), 1, marks).counts.selected == 1
    run_requests(TrinitySink(stack), everything, 2, {"order 5?": "trinity-5"})
    expected = {"sampled-0": 4, "sampled-1": 4, "marked-3": 1, "trinity-5": 2}
    deadline = time.monotonic() + _TRAINED_S
    while True:
        runs = blocking(trained_runs(stack.bus))
        counts = {task: len(runs.get(task, {})) for task in expected}
        if counts == expected:
            break
        assert time.monotonic() < deadline, f"{counts} in place of {expected}"
        time.sleep(0.3)
    assert sorted(runs["trinity-5"]) == ["0", "1"]
    assert "written" not in runs
