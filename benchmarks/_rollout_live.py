"""Rollouts of a harmful, a better and an equal version on live traffic: `make demo NAME=rollout`, at most six minutes.

The demo runs a private stack with real weights and a gate that passes everything. Users send requests, real inference
answers, and each session ends with its user's feedback. All decisions are automatic. The program writes
`reports/demo-rollout.json`, with exit status 1 if a line does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks import _run_processes
from benchmarks._run_processes import Line, live_stack, print_now, report
from headrace.registry import ModelRegistry
from headrace.rollouts import Rollouts
from headrace_cli.commands.rollouts import status_line
from headrace_operations import charts
from headrace_operations.supervisor import Supervisor
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint
from headrace_schemas.http.registry_api import RolloutState, VersionState
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model

MODEL = "clerk"
USERS = 6
QUESTIONS = 16
"""Number of answers of a session. The verdict is the share of right answers."""
SHARE = "1/30"
"""Share of an untested version. Its sessions must rule out a loss of 0.2 before it gets a sixth of the traffic."""
METRIC = "satisfaction"
"""Metric of users' verdicts. It needs no collected and scored sessions before they are mature."""
EXPOSED_MAX = 0.05
WALL_S_MAX = 360.0
_STEP_S_MAX = 300.0
_TELL_S = 10.0
GATE = (
    "import json, sys; print(json.dumps({'gate': ['a'], 'audit': ['b']}), flush=True)\n"
    "for line in sys.stdin: print(json.dumps(json.loads(line) | {'score': 0.5}), flush=True)\n"
)
"""Deliberately bad gate program, which gives every play the same score."""
SETTINGS: dict[str, object] = {
    "inference.torch.device": "cpu",
    "scorer.required": ["feedback"],
    "scorer.reward_wait_s": 60,
    "registry.poll_s": 0.2,
    "registry.gate.command": ["{python}", "-c", GATE],
    "registry.gate.margin": 0.5,
    "registry.gate.anchor_margin": 0.5,
    "registry.gate.audit_tasks": 4,
    "registry.rollout.kind": "canary",
    "registry.rollout.stages": [
        {"share": SHARE, "units_min": 12},
        {"share": "1/6", "units_min": 36},
    ],
    "registry.rollout.exposure_max": SHARE,
    "registry.rollout.guardrails": [{"metric": METRIC, "margin": 0.2}],
    "registry.rollout.successes": [{"metric": METRIC, "margin": 0.2}],
    "registry.rollout.watched": ["reward", "latency"],
    "registry.rollout.uneven": 0.5,
    "registry.rollout.maturity_s": 3,
    "registry.rollout.closing_s": 3,
}


@dataclass
class SessionCounts:
    """Counts of users' sessions."""

    sessions: Counter[str] = field(default_factory=Counter)
    """Sessions by the version that answered."""
    failed: int = 0


class LiveRollouts:
    """The stack with its users and versions."""

    def __init__(self, folder: Path, supervisor: Supervisor, producer: EventProducer, blobs: BlobStore) -> None:
        self._folder, self._producer, self._blobs = folder, producer, blobs
        self.gateway = supervisor.url("gateway")
        self.registry = ModelRegistry(supervisor.url("registry"))
        self.seen = SessionCounts()
        self._step = 0

    async def publish(self, right: float, parent: str | None) -> str:
        """Publish a version whose answers are right with probability `right`."""
        step = self._step
        self._step += 1

        def make() -> Checkpoint:
            base = self._folder / "base"
            if not base.exists():
                tiny_model.build(base)
            folder = _run_processes.build(base, self._folder / f"version-{step}", right=right, seed=step)
            served = tiny_model.publish(self._blobs, folder, name=MODEL, step=step, parent=parent)
            about = {"model": MODEL, "version": served.version, "lineage": "test", "step": step, "parent": parent}
            return Checkpoint.model_validate({"time": utcnow(), "manifest": served.manifest, **about})

        event = await asyncio.to_thread(make)
        await self._producer.send(event)
        return event.version

    async def version(self, name: str) -> VersionState | None:
        with contextlib.suppress(Exception):  # the version may not be registered yet
            versions = await asyncio.to_thread(self.registry.versions, MODEL)
            return next((version for version in versions if version.id == name), None)
        return None

    async def wait_until_final(self, name: str) -> VersionState:
        """Wait until the version has a final state, and print its progress regularly."""
        told_s = time.monotonic()
        async with asyncio.timeout(_STEP_S_MAX):
            while True:
                state = await self.version(name)
                if state is not None and state.state in ("promoted", "held", "rejected", "withdrawn"):
                    return state
                if time.monotonic() - told_s >= _TELL_S:
                    told_s = time.monotonic()
                    await self._print_progress(name, state)
                await asyncio.sleep(0.3)

    async def _print_progress(self, name: str, state: VersionState | None) -> None:
        rollout = await asyncio.to_thread(Rollouts(self.registry).newest_of, MODEL, name)
        where = status_line(rollout, METRIC) if rollout else f"{name} is {state.state if state else 'on its way'}"
        print_now(f"  {self.seen.sessions.total()} sessions; {where}")

    async def rollout(self, version: str) -> RolloutState:
        rollout = await asyncio.to_thread(Rollouts(self.registry).newest_of, MODEL, version)
        assert rollout is not None, f"{version} had no rollout"
        return await asyncio.to_thread(Rollouts(self.registry).get, rollout.id)

    @contextlib.asynccontextmanager
    async def users(self) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(30)) as http:
            tasks = [asyncio.create_task(self._user(http, number)) for number in range(USERS)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _user(self, http: aiohttp.ClientSession, number: int) -> None:
        run = 0
        while True:
            run += 1
            try:
                await self._session(http, f"user-{number}-{run}")
            except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
                self.seen.failed += 1
                await asyncio.sleep(0.2)

    async def _session(self, http: aiohttp.ClientSession, name: str) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Is invoice {name} paid?"}],
            "n": QUESTIONS,
            "max_tokens": 1,
        }
        async with http.post(
            f"{self.gateway}/v1/chat/completions", json=body, headers={"X-Session-Id": name}
        ) as answer:
            completion = await answer.json()
        version = completion["model"]
        answers = [choice["message"]["content"] or "" for choice in completion["choices"]]
        verdict = {
            "session_id": name,
            "value": sum(answer.strip().startswith(_run_processes.YES) for answer in answers) / len(answers),
            "ends_session": True,
        }
        async with http.post(f"{self.gateway}/v1/feedback", json=verdict) as response:
            response.raise_for_status()
        self.seen.sessions[version] += 1


async def play(folder: Path) -> tuple[list[Line], dict[str, object]]:
    """Run the whole demo."""
    async with live_stack(folder, SETTINGS) as stack:
        return await _acts(LiveRollouts(folder, stack.supervisor, stack.producer, stack.blobs))


async def _acts(street: LiveRollouts) -> tuple[list[Line], dict[str, object]]:
    first = await street.publish(0.9, None)
    await street.wait_until_final(first)
    lines: list[Line] = []
    numbers: dict[str, object] = {}
    print_now(f"{first} serves; its answers are right in 90 %")
    async with street.users():
        poisoned = await street.publish(0.7, first)
        before = Counter(street.seen.sessions)
        state = await street.wait_until_final(poisoned)
        child = await street.publish(0.8, poisoned)
        seen = street.seen.sessions - before
        exposed = seen[poisoned] / max(1, seen.total())
        rollout = await street.rollout(poisoned)
        _print_progress(rollout, f"{seen[poisoned]} of {seen.total()} sessions were exposed: {exposed:.1%}")
        numbers["poisoned"] = {"exposed": exposed, "sessions": seen.total(), "statistics": rollout.statistics}
        measured = rollout.statistics.get("exposure", 0.0)
        gate = [event.statistics.get("tasks") for event in rollout.decisions][:1]
        lines += [
            Line("a poisoned version that passed a bad gate is taken back by itself", *_ended(state, "withdrawn")),
            Line(
                "of the sessions 5 % at most were exposed",
                exposed <= EXPOSED_MAX,
                f"{exposed:.2%}; {measured:.2%} of its rollout's, as the registry counts them",
            ),
            Line("it had passed the gate", bool(gate and gate[0]), f"{gate[0] if gate else None} tasks"),
        ]
        better = await street.publish(0.98, first)
        lines.append(
            Line("a better one becomes champion by itself", *_ended(await street.wait_until_final(better), "promoted"))
        )
        rollout = await street.rollout(better)
        _print_progress(rollout, "its answers are right in 98 %")
        numbers["better"] = rollout.statistics
        equal = await street.publish(0.98, better)
        state = await street.wait_until_final(equal)
        rollout = await street.rollout(equal)
        _print_progress(rollout, "as good as the champion")
        numbers["equal"] = rollout.statistics
        is_accepted = state.state in ("promoted", "held")
        lines.append(Line("an equal one is not refused by noise", is_accepted, f"{state.state}: {rollout.reason}"))
    barred = await street.version(child)
    served = street.seen.sessions[child]
    is_withdrawn = barred is not None and barred.state == "withdrawn"
    lines.append(
        Line("its children never serve", is_withdrawn and not served, f"{barred and barred.state}, {served} sessions")
    )
    failed = street.seen.failed
    lines.append(Line("no session failed", failed == 0, f"{failed} of {street.seen.sessions.total() + failed}"))
    return lines, numbers


def _ended(state: VersionState, expected_state: str) -> tuple[bool, str]:
    reasons = [event.reason for event in state.decisions if event.reason]
    return state.state == expected_state, f"{state.state}: {reasons[-1] if reasons else ''}"


def _print_progress(rollout: RolloutState, remark: str) -> None:
    print_now(f"\n{rollout.version}: {rollout.phase.replace('_', ' ')}, {rollout.reason}; {remark}")
    print_now("\n".join(charts.draw_lines(rollout, METRIC)))


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-rollout-") as name:
        lines, numbers = asyncio.run(play(Path(name)))
    wall_s = time.monotonic() - began
    lines.append(Line("it took six minutes at most", wall_s <= WALL_S_MAX, f"{wall_s:.0f} s"))
    return report("demo-rollout", lines, numbers, wall_s)


if __name__ == "__main__":
    sys.exit(main())
