"""A disk that another program fills for a while under a running stack, and a disk that the stack itself fills.

The broker, the gateway and the stream services store their files on this disk. `ATTACK_FULL_DISK_S` in the environment
sets for how many seconds the disk is full (default: 120).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from headrace_operations.supervisor import Limits, Supervisor
from headrace_runtime.kafka.producer import EventProducer
from headrace_schemas import Trajectory, Turn
from tests.attack.program import attack
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import routing
from tests.support.machine import SmallDisk
from tests.support.service_process import BusView, bus_view
from tests.system.program import Line, none_of

_SERVICES = ("broker", "gateway", "collector", "scorer", "registry")
_SIZE_MB = 1024
_USERS = 6
_BEFORE_S, _AFTER_S = 5.0, 8.0
_FULL_S = float(os.environ.get("ATTACK_FULL_DISK_S", "120"))
_SETTLE_S = 90.0
_ROOM_BYTES = 8_000_000
"""Free bytes above the limit at which the gateway refuses requests; the traffic itself fills them."""
_SHORT_S, _SHORT_WAIT_S = 10.0, 90.0
_BOUND_SHARE = 0.05
"""Share of the disk that the services keep free by default."""
_REWARDS = "def short(trajectory):\n    return 1.0\n"


@dataclass
class Ledger:
    """What the users of the stack observed. Each question is unique."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    """Response id of each acknowledged question."""
    refused: dict[str, str] = field(default_factory=dict)
    """The gateway's error answer to each refused question."""
    unknown: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    stopping: bool = False
    text_length_max: int = 8000


@attack("a disk that is full while agents work")
async def full_disk(folder: Path, rng: random.Random) -> list[Line]:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # this process produces to the broker that is full, too
    with SmallDisk(folder / "disk", _SIZE_MB) as disk:
        (folder / "rewards.py").write_text(_REWARDS)
        events: list[str] = []
        settings = {
            "gateway.capture.spool_reserve_bytes": 1 << 20,
            "scorer.functions": [f"{folder}/rewards.py:short"],
            "security.replica_hosts": ["127.0.0.1"],
        }
        supervisor = Supervisor(
            disk.path / "data",
            settings=settings,
            only=_SERVICES,
            auto_ports=True,
            limits=Limits(health_timeout_s=5.0),
            report=events.append,
        )
        supervisor.start()
        try:
            state = await asyncio.to_thread(supervisor.wait_up, 240)
            async with bus_view(state.bus, disk.path / "data") as view, FakeReplica().running() as replica:
                return await _play(disk, supervisor, view, replica, rng, events)
        finally:
            await asyncio.to_thread(supervisor.stop)


async def _play(
    disk: SmallDisk, supervisor: Supervisor, view: BusView, replica: FakeReplica, rng: random.Random, events: list[str]
) -> list[Line]:
    await view.producer.send(routing(replica.versions[0]))
    beating = asyncio.create_task(_beat(view.producer, replica))
    ledger, url = Ledger(), supervisor.url("gateway")
    users = [asyncio.create_task(_use(url, ledger, number, rng.getrandbits(32))) for number in range(_USERS)]
    try:
        await asyncio.sleep(_BEFORE_S)
        reports, named = await _full_for(disk, _FULL_S, disk.path / "data")
        disk.free()
        before = len(ledger.acknowledged)
        await asyncio.sleep(_AFTER_S)
        shortage = await _fill_by_itself(disk, ledger)
        await asyncio.sleep(_AFTER_S)
        ledger.stopping = True
        await asyncio.gather(*users)
        after = len(ledger.acknowledged) - before
        turns = await _until_there(view, ledger)
        await _end_all(url, ledger)
        collected = await _collected(view, set(ledger.acknowledged.values()))
        return [*_lines(supervisor, ledger, turns, collected, reports, named, after, events), *shortage]
    finally:
        ledger.stopping = True
        beating.cancel()
        await asyncio.gather(beating, *users, return_exceptions=True)


def _lines(
    supervisor: Supervisor,
    ledger: Ledger,
    turns: list[Turn],
    collected: set[str],
    reports: int,
    named: set[str],
    after: int,
    events: list[str],
) -> list[Line]:
    state = supervisor.state
    ended = sum(service.restarts for service in state.services.values()) + sum(
        service.pid is None for service in state.services.values()
    )
    present = {turn.turn_id for turn in turns}
    delivered_prompts = {turn.messages[-1].text for turn in turns if turn.delivered}
    answered = set(ledger.acknowledged.values())
    wordless = [text for text in ledger.refused.values() if "disk: " not in text]
    return [
        Line("services that ended", f"{ended} (supervisor: {'; '.join(events) or 'nothing'})", "0", ended == 0),
        none_of("acknowledged turns lost", len(answered - present), len(answered)),
        none_of(
            "refused turns recorded as delivered", len(delivered_prompts & ledger.refused.keys()), len(ledger.refused)
        ),
        none_of("refusals that do not name the disk", len(wordless), len(ledger.refused)),
        none_of("acknowledged turns in no trajectory afterwards", len(answered - collected), len(answered)),
        Line(
            "times that `headrace status` named the disk",
            f"{reports}, for {', '.join(sorted(named))}",
            "1",
            reports >= 1,
        ),
        Line("turns acknowledged once there was room", str(after), "at least 1", after > 0),
    ]


async def _fill_by_itself(disk: SmallDisk, ledger: Ledger) -> list[Line]:
    """Let the users' traffic fill the disk until requests are refused, go on for a while, then free space again."""
    loop = asyncio.get_running_loop()
    bound = _SIZE_MB * (1 << 20) * _BOUND_SHARE
    ledger.text_length_max = 60_000
    disk.leave(int(bound) + _ROOM_BYTES)
    acknowledged, refused, least = len(ledger.acknowledged), len(ledger.refused), disk.free_bytes
    first_refusal_s = loop.time()
    deadline = first_refusal_s + _SHORT_WAIT_S
    while loop.time() < deadline:
        least = min(least, disk.free_bytes)
        if len(ledger.refused) > refused:
            deadline = min(deadline, first_refusal_s + _SHORT_S)
        else:
            first_refusal_s = loop.time()
        await asyncio.sleep(0.05)
    worked, stopped = len(ledger.acknowledged) - acknowledged, len(ledger.refused) - refused
    disk.free()
    share = least / bound
    return [
        Line("turns acknowledged while the stack filled the disk", str(worked), "at least 1", worked > 0),
        Line("turns refused before the disk was full", str(stopped), "at least 1", stopped > 0),
        Line("least that was free, as a share of the bound", f"{share:.2f}", "at least 0.25", share >= 0.25),
    ]


async def _full_for(disk: SmallDisk, seconds: float, data_dir: Path) -> tuple[int, set[str]]:
    """Fill the disk for `seconds`. Return the number of status reports about it, and the services that they name."""
    loop = asyncio.get_running_loop()
    deadline, reports, named = loop.time() + seconds, 0, set[str]()
    while loop.time() < deadline:
        await asyncio.to_thread(disk.fill)
        command = [str(Path(sys.executable).with_name("headrace")), "status", "--no-account", "--json"]
        completed = await asyncio.to_thread(
            subprocess.run, [*command, "--data-dir", str(data_dir)], capture_output=True, text=True, timeout=120
        )
        if completed.returncode == 0:
            services = json.loads(completed.stdout)["run"]["services"]
            full = {
                name for name, service in services.items() if any("no space left" in lack for lack in service["lacks"])
            }
            reports, named = reports + bool(full), named | full
        await asyncio.sleep(0.2)
    return reports, named


async def _use(url: str, ledger: Ledger, number: int, seed: int) -> None:
    """Act as one user: short runs, one question after the other. A refused question is sent again under a new name."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(timeout=120) as http:
        count = 0
        while not ledger.stopping:
            count += 1
            session, question = f"s-{number}-{count // 5}", f"question {number}.{count}"
            ledger.sessions.add(session)
            text = f"{question} {'x' * rng.randrange(ledger.text_length_max)}"
            body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
            try:
                answer = await http.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": session})
            except httpx.HTTPError:
                ledger.unknown.add(text)
            else:
                if answer.status_code == 200:
                    ledger.acknowledged[text] = answer.json()["id"]
                else:
                    ledger.refused[text] = answer.text
                    await asyncio.sleep(0.2)
            await asyncio.sleep(0.05)


async def _beat(producer: EventProducer, replica: FakeReplica) -> None:
    while True:
        with contextlib.suppress(Exception):  # the bus may refuse; a replica goes on
            async with asyncio.timeout(2):
                await producer.send(replica.heartbeat())
        await asyncio.sleep(1)


async def _until_there(view: BusView, ledger: Ledger) -> list[Turn]:
    """Wait until all acknowledged turns are on the bus or `_SETTLE_S` is over, and return the turns on the bus."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_S
    while True:
        turns = await view.read(Turn)
        missing = set(ledger.acknowledged.values()) - {turn.turn_id for turn in turns}
        if not missing or loop.time() > deadline:
            return turns
        await asyncio.sleep(1)


async def _end_all(url: str, ledger: Ledger) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        for session in sorted(ledger.sessions):
            (await http.post(f"{url}/v1/sessions/{session}/end")).raise_for_status()


async def _collected(view: BusView, expected: set[str]) -> set[str]:
    """Wait, for a limited time, until trajectories contain the expected turns. Return all turns that they contain."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_S
    while True:
        collected = {
            turn_id
            for trajectory in await view.read(Trajectory)
            for turn_id in (*trajectory.turn_ids, *_left_out(trajectory))
        }
        if expected <= collected or loop.time() > deadline:
            return collected
        await asyncio.sleep(1)


def _left_out(trajectory: Trajectory) -> list[str]:
    return [left.turn_id for left in trajectory.left_out]
