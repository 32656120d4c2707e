"""`make example-java`: AgentScope's Java agent trains through the gateway; `reports/example-java.json`; status 1 when a
line does not hold.

The stack is private, its base a tiny model of random weights: what is shown is which runs are trained, not that they
get better. A local server stands for the production model.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from headrace.stack import Stack, attach
from tests.support import presence, tiny_model
from tests.support.fake_llm import FakeLLM, say
from tests.support.java_agent import JavaAgent, compiled
from tests.support.ports import free_port
from tests.support.trained_runs import Runs, trained_runs

REPORT = Path("reports") / "example-java.json"
ANSWER = "It left the warehouse and comes on Monday."
REQUESTS = 4
REPEAT = 4
_TRAINED_S = 90.0
_QUIET_S = 3.0
"""How long nothing more may come before what there is counts as all."""
_JAVA_S = 60.0


@dataclass(frozen=True)
class Line:
    """One thing that is promised."""

    name: str
    wanted: object
    found: object

    @property
    def holds(self) -> bool:
        return self.wanted == self.found


class Example:
    """Two lives of the Java agent on one stack."""

    def __init__(self, stack: Stack, port: int, classes: Path) -> None:
        self.stack, self.classes = stack, classes
        self.door = f"http://127.0.0.1:{port}"

    def sampling(self) -> Iterator[Line]:
        """Every request is chosen, and played again four times."""
        found, refused, answers, asked = self._lived("sampling", lambda new: sum(map(len, new.values())))
        yield Line("sampling: users are answered by the production model alone", [ANSWER] * REQUESTS, answers)
        yield Line("sampling: calls of the production model", REQUESTS, asked)
        yield Line("sampling: tasks that were trained", REQUESTS, len(found))
        runs = sorted(sorted(runs) for runs in found.values())
        yield Line("sampling: trained runs of each task", [[str(run) for run in range(REPEAT)]] * REQUESTS, runs)
        told = "cancel_order is not marked read-only" in refused
        yield Line("a copy's write is refused by name", True, told)

    def marking(self) -> Iterator[Line]:
        """Every other request is marked."""
        found, _, answers, _ = self._lived("marking", lambda new: REPEAT * sum(map(len, new.values())) * 2)
        yield Line("marking: users are answered by the production model alone", [ANSWER] * REQUESTS, answers)
        yield Line("marking: only marked requests are trained", {"marked-0": ["0"], "marked-2": ["0"]},
                   {task: sorted(runs) for task, runs in sorted(found.items())})  # fmt: skip

    def door_lines(self) -> Iterator[Line]:
        """The three pages, as a program sees them."""
        ask = {"model": self.stack.model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
        with httpx.Client(base_url=self.door, timeout=60) as http:
            answer = http.post("/chat", json=ask)
            yield Line("/chat", 200, answer.status_code)
            said = {"msg_ids": [answer.json().get("id", "")], "reward": 0.5, "task_id": "by-hand", "run_id": "0"}
            yield Line("/feedback", (200, {"status": "success"}), _told(http.post("/feedback", json=said)))
            yield Line("/commit", (200, {"status": "success"}), _told(http.post("/commit")))
        nothing = asyncio.run(trained_runs(self.stack.bus)).keys() & {""}
        yield Line("runs that were trained and belong to no task", [], sorted(nothing))

    def _lived(self, mode: str, enough: Callable[[Runs], int]) -> tuple[Runs, str, list[str], int]:
        """What was trained of one life, what its write was told, what its users read, calls of the production model."""
        before = asyncio.run(trained_runs(self.stack.bus))
        with FakeLLM(say(ANSWER)) as production:
            words = (mode, self.door, self.stack.model, production.base_url.removesuffix("/v1"), "production")
            with JavaAgent(self.classes, *words) as java:
                refused = java.line("refused", _JAVA_S)
                answers = [java.line("answer", _JAVA_S) for _ in range(REQUESTS)]
                found = self._trained(before, enough)
            return found, refused, answers, len(production.calls)

    def _trained(self, before: Runs, enough: Callable[[Runs], int]) -> Runs:
        """New runs: once there are as many as there should be, and none has come for a while."""
        deadline, since, found = time.monotonic() + _TRAINED_S, time.monotonic(), Runs()
        while time.monotonic() < deadline:
            now = asyncio.run(trained_runs(self.stack.bus))
            new = {task: runs for task, runs in now.items() if task not in before}
            if new != found:
                since, found = time.monotonic(), new
            if enough(found) >= REQUESTS * REPEAT and time.monotonic() - since > _QUIET_S:
                break
            time.sleep(0.5)
        return found


def _told(answer: httpx.Response) -> tuple[int, object]:
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


def main() -> int:
    if reason := presence.CHECKS["agentscope-java"]():
        print(f"the example cannot be run here: {reason}")
        return 1
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="headrace-java-") as folder:
        for line in lines(Path(folder)):
            found.append(line)
            told = "" if line.holds else f": wanted {line.wanted}, found {line.found}"
            print(f"{'holds' if line.holds else 'FAILS':6} {line.name}{told}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    REPORT.parent.mkdir(exist_ok=True)
    said = {"lines": [{**asdict(one), "holds": one.holds} for one in found], "seconds": seconds}
    REPORT.write_text(json.dumps(said, indent=2) + "\n")
    print(f"{sum(one.holds for one in found)} of {len(found)} lines hold, {seconds} s")
    return int(not all(one.holds for one in found))


if __name__ == "__main__":
    sys.exit(main())
