"""AgentScope's Java agent, trained through the gateway.

The stack is private, its base a tiny model of random weights: the lines show which runs are trained, not that they
improve. A local server stands for the production model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from headrace.stack import Stack, attach
from tests.support import presence, tiny_model
from tests.support.fake_llm import FakeLLM, say
from tests.support.packages import JavaAgent, Runs, compiled, trained_runs
from tests.support.processes import free_port
from tests.system.program import Line, Program, Run, equals

ANSWER = "It left the warehouse and comes on Monday."
REQUESTS = 4
REPEAT = 4
_TRAINED_S = 90.0
_QUIET_S = 3.0
"""Time without new runs after which the list counts as complete."""
_JAVA_S = 60.0
SUCCESS = {"status": "success"}


class Example:
    """Two runs of the Java agent on one stack."""

    def __init__(self, stack: Stack, port: int, classes: Path) -> None:
        self.stack, self.classes = stack, classes
        self.address = f"http://127.0.0.1:{port}"

    def sampling(self) -> Iterator[Line]:
        """Every request is chosen, and played again four times."""
        runs_by_task, refused, answers, calls = self._run_agent("sampling", lambda new: sum(map(len, new.values())))
        yield equals("sampling: users are answered by the production model alone", answers, [ANSWER] * REQUESTS)
        yield equals("sampling: calls of the production model", calls, REQUESTS)
        yield equals("sampling: tasks that were trained", len(runs_by_task), REQUESTS)
        runs = sorted(sorted(runs) for runs in runs_by_task.values())
        yield equals("sampling: trained runs of each task", runs, [[str(run) for run in range(REPEAT)]] * REQUESTS)
        refusal = "cancel_order is not marked read-only"
        yield equals("a copy's write is refused by name", refusal in refused, expected=True)

    def marking(self) -> Iterator[Line]:
        """Every other request is marked."""
        runs_by_task, _, answers, _ = self._run_agent("marking", lambda new: REPEAT * sum(map(len, new.values())) * 2)
        yield equals("marking: users are answered by the production model alone", answers, [ANSWER] * REQUESTS)
        trained = {task: sorted(runs) for task, runs in sorted(runs_by_task.items())}
        yield equals("marking: only marked requests are trained", trained, {"marked-0": ["0"], "marked-2": ["0"]})

    def door_lines(self) -> Iterator[Line]:
        """The three pages, as a program sees them."""
        ask = {"model": self.stack.model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
        with httpx.Client(base_url=self.address, timeout=60) as http:
            answer = http.post("/chat", json=ask)
            yield equals("/chat", answer.status_code, 200)
            feedback = {"msg_ids": [answer.json().get("id", "")], "reward": 0.5, "task_id": "by-hand", "run_id": "0"}
            yield equals("/feedback", _status_and_body(http.post("/feedback", json=feedback)), (200, SUCCESS))
            yield equals("/commit", _status_and_body(http.post("/commit")), (200, SUCCESS))
        nothing = asyncio.run(trained_runs(self.stack.bus)).keys() & {""}
        yield equals("runs that were trained and belong to no task", sorted(nothing), [])

    def _run_agent(self, mode: str, enough: Callable[[Runs], int]) -> tuple[Runs, str, list[str], int]:
        """Run the Java agent in a mode until `enough` of its runs are trained.

        Returns:
            The trained runs by task, the refusal of a copy's write, the answers to users, and the number of calls of
            the production model.
        """
        before = asyncio.run(trained_runs(self.stack.bus))
        with FakeLLM(say(ANSWER)) as production:
            words = (mode, self.address, self.stack.model, production.base_url.removesuffix("/v1"), "production")
            with JavaAgent(self.classes, *words) as java:
                refused = java.line("refused", _JAVA_S)
                answers = [java.line("answer", _JAVA_S) for _ in range(REQUESTS)]
                runs = self._trained(before, enough)
            return runs, refused, answers, len(production.calls)

    def _trained(self, before: Runs, enough: Callable[[Runs], int]) -> Runs:
        """New runs: once there are as many as there should be, and none has come for a while."""
        deadline, since, newest = time.monotonic() + _TRAINED_S, time.monotonic(), Runs()
        while time.monotonic() < deadline:
            now = asyncio.run(trained_runs(self.stack.bus))
            new = {task: runs for task, runs in now.items() if task not in before}
            if new != newest:
                since, newest = time.monotonic(), new
            if enough(newest) >= REQUESTS * REPEAT and time.monotonic() - since > _QUIET_S:
                break
            time.sleep(0.5)
        return newest


def _status_and_body(answer: httpx.Response) -> tuple[int, object]:
    return answer.status_code, answer.json()


def lines(folder: Path) -> Iterator[Line]:
    port = free_port()
    settings: dict[str, object] = {
        "gateway.trinity_port": port,
        "inference.torch.device": "cpu",
        "inference.torch.context_tokens_max": 640,
        "trainer.compute.device": "cpu",
        "trainer.native.tokens": 256,
        "trainer.algorithm": "reinforce++",
        "trainer.batch_experiences": REPEAT,
    }
    with attach(base=tiny_model.build(folder / "tiny"), settings=settings) as stack:
        example = Example(stack, port, compiled(folder / "classes"))
        yield from example.sampling()
        yield from example.marking()
        yield from example.door_lines()


def play(run: Run) -> None:
    run.add_all(lines(run.folder))


PROGRAM = Program("Train AgentScope's Java agent.", play, missing=presence.CHECKS["agentscope-java"])
