"""A poisoned, a better and an equal version on live traffic: `make demo-rollout`, six minutes at most.

A private stack with real weights and a gate that passes everything. Users ask, real inference answers, and each
session ends with its user's verdict. Nobody decides anything by hand. Writes `reports/demo-rollout.json`; exit status 1
when one of its lines does not hold.
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

from benchmarks import _rollout_models
from benchmarks._live_lines import Line, report, say
from benchmarks._live_stack import live_stack
from headrace.registry import ModelRegistry
from headrace.rollouts import Rollouts
from headrace_cli.commands.rollouts import in_a_line
from headrace_cli.rollouts import chart
from headrace_cli.supervisor import Supervisor
from headrace_runtime.blobs import BlobStore
from headrace_runtime.producer import EventProducer
from headrace_schemas import Checkpoint
from headrace_schemas.base import utcnow
from headrace_schemas.registry_api import VersionState
from headrace_schemas.rollout_api import RolloutState
from tests.support import tiny_model

MODEL = "clerk"
USERS = 6
QUESTIONS = 16
"""Answers that a session asks for; its verdict is the share of the right ones."""
SHARE = "1/30"
"""Of a version about which nothing is known. Its sessions have to rule out a loss of 0.2 before it gets a sixth."""
METRIC = "satisfaction"
"""Users' verdicts, as they say them: nothing has to be collected and scored before a session is mature."""
EXPOSED_MAX = 0.05
WALL_S_MAX = 360.0
_STEP_S_MAX = 300.0
_TELL_S = 10.0
GATE = (
    "import json, sys; print(json.dumps({'gate': ['a'], 'audit': ['b']}), flush=True)\n"
    "for line in sys.stdin: print(json.dumps(json.loads(line) | {'score': 0.5}), flush=True)\n"
)
"""Deliberately bad: whoever plays gets the same score."""
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
    "registry.rollout.read_s": 0.2,
}


@dataclass
class Seen:
    """What the users saw."""

    sessions: Counter[str] = field(default_factory=Counter)
    """By the version that answered."""
    failed: int = 0


class Street:
    """The stack, its users and its versions."""

    def __init__(self, folder: Path, supervisor: Supervisor, producer: EventProducer, blobs: BlobStore) -> None:
        self._folder, self._producer, self._blobs = folder, producer, blobs
        self.gateway = supervisor.url("gateway")
        self.registry = ModelRegistry(supervisor.url("registry"))
        self.seen = Seen()
        self._step = 0

    async def publish(self, right: float, parent: str | None) -> str:
        """A version that answers right with that probability."""
        step = self._step
        self._step += 1

        def make() -> Checkpoint:
            base = self._folder / "base"
            if not base.exists():
                tiny_model.build(base)
            folder = _rollout_models.build(base, self._folder / f"version-{step}", right=right, seed=step)
            served = tiny_model.publish(self._blobs, folder, name=MODEL, step=step, parent=parent)
            about = {"model": MODEL, "version": served.version, "lineage": "test", "step": step, "parent": parent}
            return Checkpoint.model_validate({"time": utcnow(), "manifest": served.manifest, **about})

        event = await asyncio.to_thread(make)
        await self._producer.send(event)
        return event.version

    async def version(self, name: str) -> VersionState | None:
        with contextlib.suppress(Exception):  # not registered yet
            found = await asyncio.to_thread(self.registry.versions, MODEL)
            return next((one for one in found if one.id == name), None)
        return None

    async def settled(self, name: str) -> VersionState:
        """Until the version has an end of its own. Says now and then how far it is."""
        told_s = time.monotonic()
        async with asyncio.timeout(_STEP_S_MAX):
            while True:
                found = await self.version(name)
                if found is not None and found.state in ("promoted", "held", "rejected", "withdrawn"):
                    return found
                if time.monotonic() - told_s >= _TELL_S:
                    told_s = time.monotonic()
                    await self._tell(name, found)
                await asyncio.sleep(0.3)

    async def _tell(self, name: str, found: VersionState | None) -> None:
        rollout = await asyncio.to_thread(Rollouts(self.registry).newest_of, MODEL, name)
        where = in_a_line(rollout, METRIC) if rollout else f"{name} is {found.state if found else 'on its way'}"
        say(f"  {self.seen.sessions.total()} sessions; {where}")

    async def rollout(self, version: str) -> RolloutState:
        found = await asyncio.to_thread(Rollouts(self.registry).newest_of, MODEL, version)
        assert found is not None, f"{version} had no rollout"
        return await asyncio.to_thread(Rollouts(self.registry).get, found.id)

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
            found = await answer.json()
        version = found["model"]
        said = [choice["message"]["content"] or "" for choice in found["choices"]]
        verdict = {
            "session_id": name,
            "value": sum(one.strip().startswith(_rollout_models.YES) for one in said) / len(said),
            "ends_session": True,
        }
        async with http.post(f"{self.gateway}/v1/feedback", json=verdict) as told:
            told.raise_for_status()
        self.seen.sessions[version] += 1


async def play(folder: Path) -> tuple[list[Line], dict[str, object]]:
    """The whole demo."""
    async with live_stack(folder, SETTINGS) as stack:
        return await _acts(Street(folder, stack.supervisor, stack.producer, stack.blobs))


async def _acts(street: Street) -> tuple[list[Line], dict[str, object]]:
    first = await street.publish(0.9, None)
    await street.settled(first)
    lines: list[Line] = []
    numbers: dict[str, object] = {}
    say(f"{first} serves; its answers are right in 90 %")
    async with street.users():
        poisoned = await street.publish(0.7, first)
        before = Counter(street.seen.sessions)
        state = await street.settled(poisoned)
        child = await street.publish(0.8, poisoned)
        seen = street.seen.sessions - before
        exposed = seen[poisoned] / max(1, seen.total())
        rollout = await street.rollout(poisoned)
        _tell(rollout, f"{seen[poisoned]} of {seen.total()} sessions were exposed: {exposed:.1%}")
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
        lines.append(Line("a better one becomes champion by itself", *_ended(await street.settled(better), "promoted")))
        rollout = await street.rollout(better)
        _tell(rollout, "its answers are right in 98 %")
        numbers["better"] = rollout.statistics
        equal = await street.publish(0.98, better)
        state = await street.settled(equal)
        rollout = await street.rollout(equal)
        _tell(rollout, "as good as the champion")
        numbers["equal"] = rollout.statistics
        kept = state.state in ("promoted", "held")
        lines.append(Line("an equal one is not refused by noise", kept, f"{state.state}: {rollout.reason}"))
    barred = await street.version(child)
    served = street.seen.sessions[child]
    known = barred is not None and barred.state == "withdrawn"
    lines.append(
        Line("its children never serve", known and not served, f"{barred and barred.state}, {served} sessions")
    )
    failed = street.seen.failed
    lines.append(Line("no session failed", failed == 0, f"{failed} of {street.seen.sessions.total() + failed}"))
    return lines, numbers


def _ended(state: VersionState, wanted: str) -> tuple[bool, str]:
    reasons = [event.reason for event in state.decisions if event.reason]
    return state.state == wanted, f"{state.state}: {reasons[-1] if reasons else ''}"


def _tell(rollout: RolloutState, remark: str) -> None:
    say(f"\n{rollout.version}: {rollout.phase.replace('_', ' ')}, {rollout.reason}; {remark}")
    say("\n".join(chart.drawn(rollout, METRIC)))


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-rollout-") as name:
        lines, numbers = asyncio.run(play(Path(name)))
    wall_s = time.monotonic() - began
    lines.append(Line("it took six minutes at most", wall_s <= WALL_S_MAX, f"{wall_s:.0f} s"))
    return report("demo-rollout", lines, numbers, wall_s)


if __name__ == "__main__":
    sys.exit(main())
