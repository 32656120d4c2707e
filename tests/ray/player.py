"""A trainer's whole life in a process of its own: `python -m tests.ray.player FOLDER SETTINGS [VICTIM POINT]`.

The bus is in memory and new in each process: a trainer continues from its save, so it reads no earlier records. Blobs
and announcements are files in FOLDER. With a VICTIM, that process is killed while the ranks answer call number POINT of
the calls that the trainer makes once the lineage is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_runtime.settings.sections import complete
from headrace_schemas import Checkpoint, Event, TrainingMetrics
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from tests.unit.trainer.world import Bus, Idle, World, experience

SENT = "sent.jsonl"
COUNTED = "calls.json"
EXPERIENCES = 26
_LIFE_S = 500


@dataclass
class TellingBus(Bus):
    """Bus with its records from the first version on. It stores announcements."""

    folder: Path = Path()
    first: Callable[[], str] = str

    async def send(self, event: Event) -> None:
        if isinstance(event, Checkpoint) and not self.records:
            story(self, self.first())
        if isinstance(event, TrainingMetrics):
            with (self.folder / SENT).open("a", encoding="utf-8") as file:
                file.write(event.to_json().decode() + "\n")
        await super().send(event)


def story(bus: Bus, version: str) -> None:
    """Return rows of many lengths, redeliveries, and later revisions of trained rows."""
    events = [
        experience(n, version, reward=(n * 7) % 5 / 2, task=f"t{n % 3}", length=9 + 4 * (n % 5))
        for n in range(EXPERIENCES)
    ]
    bus.produce(*events[:9], events[2], events[3], *events[9:])
    bus.produce(experience(1, version, reward=-1.0, revision=1, task="t1", length=13))
    bus.produce(experience(4, version, reward=None, revision=1, task="t1", length=25))
    bus.produce(*(experience(n, version, reward=n % 2, task="t", length=12) for n in range(40, 42)))


def settings_of(table: dict[str, Any]) -> TrainerSettings:
    small = {
        "model": "m", "batch_experiences": 6, "batch_experiences_min": 1, "steps_per_version": 2, "max_staleness": 20,
        "save_interval_s": 1e-9, "retry_s": 5.0, "native": {"tokens": 0}, "compute": {"device": "cpu"},
    }  # fmt: skip
    return complete(TrainerSettings).model_validate({**small, **table})


async def play(folder: Path, settings: TrainerSettings) -> None:
    bus = TellingBus(folder=folder)
    world = World(folder, bus=bus)

    def first() -> str:
        saved = LineageStore(world.blobs, settings.replays or settings.lineage).read()
        assert saved is not None
        return saved.versions[0].version

    bus.first = first
    with contextlib.suppress(Idle):
        await asyncio.wait_for(world.trainer(settings).run(), _LIFE_S)


class Killing:
    """Kills at one of the calls; counts them."""

    def __init__(self, victim: str | None, point: int) -> None:
        self.victim = victim
        self.point = point
        self.calls: list[str] = []

    def install(self) -> None:
        from headrace_trainer.ray_learner.ranks import Ranks

        waits = Ranks._wait

        def wait(ranks: Any, method: str, calls: list[Any], *rest: Any) -> None:
            if method not in {"place", "meet", "join"}:
                self.calls.append(method)
                if self.victim is not None and len(self.calls) == self.point:
                    self._kill()
            waits(ranks, method, calls, *rest)

        Ranks._wait = wait  # type: ignore[method-assign, assignment]

    def _kill(self) -> None:
        (Path(sys.argv[1]) / "killed").write_text(self.victim or "", encoding="ascii")
        if self.victim == "trainer":
            os.kill(os.getpid(), signal.SIGKILL)
        for pid in pids_of(self.victim or ""):
            os.kill(pid, signal.SIGKILL)


def pids_of(victim: str) -> list[int]:
    """Return the process ids of the children and grandchildren: `raylet`, or `rank0`, `rank1`, in the order of their
    start.
    """
    pids = []
    for pid, name in descendants(os.getpid()):
        if (victim == "raylet" and "raylet/raylet" in name) or (
            victim.startswith("rank") and name.startswith("ray::Rank")
        ):
            pids.append(pid)
    pids.sort()
    assert pids, f"no process is {victim}"
    return pids if victim == "raylet" else [pids[int(victim.removeprefix("rank"))]]


def descendants(root: int) -> list[tuple[int, str]]:
    """Numbers and command lines."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])

    def below(pid: int) -> bool:
        while pid := parents.get(pid, 0):
            if pid == root:
                return True
        return False

    return [(pid, names[pid]) for pid in parents if below(pid)]


def main(folder: str, table: str, victim: str | None = None, point: str = "0") -> None:
    settings = settings_of(json.loads(table))
    killing = Killing(victim, int(point))
    if settings.backend == "ray":
        killing.install()
    asyncio.run(play(Path(folder), settings))
    (Path(folder) / COUNTED).write_text(json.dumps(killing.calls), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
