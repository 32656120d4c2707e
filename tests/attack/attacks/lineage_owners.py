"""Two trainers of one lineage: a thousand times as threads over a slow blob store, and as processes on a bus."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock

from fsspec.implementations.local import LocalFileSystem

from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import CorruptBlob, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.learner import WEIGHTS
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.store import LineageStore, LineageTaken
from headrace_trainer.settings import TrainerSettings
from tests.attack.program import attack
from tests.simulation import services
from tests.support import tiny_model
from tests.support.processes import wait_until
from tests.support.servers import BrokerProcess
from tests.support.service_process import ServiceProcess
from tests.system.program import Line, at_most, none_of
from tests.unit.trainer.world import experience

OVERLAPS = 1000
_AT_ONCE = 16
_LATENCY_S = 0.002
_LIVES = 2
_SAVES = 3
_LEASE_S = 3.0
_TAKEOVER_S = 30.0
_START_S = 300.0
"""Maximum seconds for the start of a process, which is not part of the measurement."""
_MODEL = "m"


@attack("two trainers of one lineage")
async def lineage_owners(folder: Path, rng: random.Random) -> list[Line]:
    overlaps = await asyncio.to_thread(_overlaps, folder / "overlaps", rng)
    return [*overlaps, *await asyncio.to_thread(_processes, folder)]


# In threads


class SlowBlobs(BlobStore):
    """Blob store in which every request takes a random time, so that the requests of two clients interleave in any
    order.
    """

    def __init__(self, url: str, seed: str, *, objects: bool) -> None:
        super().__init__(url)
        self._random = random.Random(seed)
        if objects:
            self._fs, self._local = Objects(Path(self._root).parent), False

    def _wait(self) -> None:
        time.sleep(self._random.expovariate(1 / _LATENCY_S))

    def get(self, ref: BlobRef) -> bytes:
        self._wait()
        return super().get(ref)

    def pointer(self, name: str) -> bytes | None:
        self._wait()
        return super().pointer(name)

    def _write(self, path: str, data: bytes) -> None:
        self._wait()
        super()._write(path, data)

    def _write_file(self, target: str, path: Path, *, move: bool) -> None:
        self._wait()
        super()._write_file(target, path, move=move)

    def get_file(self, ref: BlobRef, path: Path) -> None:
        self._wait()
        super().get_file(ref, path)

    def _create(self, path: str, data: bytes) -> bool:
        self._wait()
        created = super()._create(path, data)
        self._wait()
        return created

    def _remove(self, path: str) -> None:
        self._wait()
        super()._remove(path)

    def _names(self, folder: str) -> list[tuple[str, str]]:
        self._wait()
        return super()._names(folder)


class Objects(LocalFileSystem):  # type: ignore[misc]
    """Folder that behaves like an object store: whole objects, conditional writes, and no rename."""

    protocol = ("s3", "s3a")
    _writing = Lock()

    def __init__(self, drafts: Path) -> None:
        super().__init__(skip_instance_cache=True)
        self._drafts = drafts

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        with self._writing:
            if mode == "create" and Path(path).exists():
                raise FileExistsError(path)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            draft = self._drafts / uuid.uuid4().hex
            draft.write_bytes(value)
            draft.replace(path)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        with self._writing:
            entries: list[Any] = super().ls(path, detail=detail)
            return entries


@dataclass
class Overlap:
    """Result of one overlap of two trainers, or the sum of several results."""

    saves: int = 0
    takeovers: int = 0
    acknowledged: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)
    lost: int = 0

    def add(self, other: Overlap) -> None:
        self.saves += other.saves
        self.takeovers += other.takeovers
        self.acknowledged |= other.acknowledged
        self.unreadable += other.unreadable


def _overlaps(folder: Path, rng: random.Random) -> list[Line]:
    seeds = [rng.randrange(2**32) for _ in range(OVERLAPS)]
    with _light_models(), ThreadPoolExecutor(_AT_ONCE) as pool:
        overlaps = list(pool.map(partial(_overlap, folder), range(OVERLAPS), seeds))
    saves, takeovers = sum(overlap.saves for overlap in overlaps), sum(overlap.takeovers for overlap in overlaps)
    unreadable = [problem for overlap in overlaps for problem in overlap.unreadable]
    return [
        none_of("states that could not be read", len(unreadable), saves),
        Line("the first of them", unreadable[0] if unreadable else "none", "none", not unreadable),
        none_of("acknowledged saves that are lost", sum(overlap.lost for overlap in overlaps), saves),
        Line("losers that were told so", str(takeovers), f"at least {OVERLAPS // 2}", takeovers >= OVERLAPS // 2),
    ]


@contextlib.contextmanager
def _light_models() -> Iterator[None]:
    """Replace the learner by one whose weights are the list of its training examples. All other code is the trainer's
    own.
    """
    with contextlib.ExitStack() as stack:
        for name, substitute in services.AS_TORCH.items():
            stack.enter_context(mock.patch(name, substitute))
        # A process that is killed leaves the page cache behind: nothing here waits for the disk.
        stack.enter_context(mock.patch("os.fsync"))
        yield


def _overlap(folder: Path, number: int, seed: int) -> Overlap:
    overlap = Overlap()
    url = (folder / f"{number}").as_uri()
    with ThreadPoolExecutor(2) as pool:
        trainers = [pool.submit(_trainer, url, seed, number, which) for which in (0, 1)]
        for trainer in trainers:
            overlap.add(trainer.result())
    final = LineageStore(BlobStore(url), "main")
    try:
        saved = final.read()
        assert saved is not None
        for ref in saved.blobs().values():
            final.get(ref)
        with final.open_tensors(saved.present) as unpacked:
            lessons = {lesson.experience_id for lesson in services.read_frozen((unpacked / WEIGHTS).read_bytes())}
        overlap.lost = len(overlap.acknowledged - lessons)
    except (CorruptBlob, Unavailable) as error:
        overlap.unreadable.append(f"overlap {number}: {error}")
    return overlap


def _trainer(url: str, seed: int, number: int, which: int) -> Overlap:
    """Start one trainer `_LIVES` times. Every start takes the lineage over at once, because no lease is set."""
    overlap = Overlap()
    draw = random.Random(f"{seed} {which}")
    for life in range(_LIVES):
        blobs = SlowBlobs(url, f"{seed} {which} {life}", objects=number % 2 == 0)
        time.sleep(draw.expovariate(1 / (8 * _LATENCY_S)))
        name = f"{which}-{life}"
        try:
            lineage = _opened(blobs)
            for _ in range(_SAVES):
                _train(lineage, draw)
                lineage.save(publish=draw.random() < 0.5)
                overlap.saves += 1
                overlap.acknowledged |= {lesson.experience_id for lesson in _lessons(lineage)}
        except LineageTaken:
            overlap.takeovers += 1
        except (CorruptBlob, Unavailable) as error:
            overlap.unreadable.append(f"overlap {number}, trainer {name}: {error}")
    return overlap


def _opened(blobs: BlobStore) -> Lineage:
    store = LineageStore(blobs, "main")
    while not store.take_over():
        pass
    settings = TrainerSettings(
        base=str(services.BASE), model=_MODEL, batch_experiences=1, batch_experiences_min=1, steps_per_version=1
    )
    return open_lineage(settings, blobs, SystemClock(), store)


def _train(lineage: Lineage, draw: random.Random) -> None:
    lesson = experience(draw.randrange(2**40), lineage.state.history.head, reward=draw.random(), model=_MODEL)
    lineage.state.admit(lesson, (0, 0), SystemClock().now())
    batch = lineage.next_batch()
    assert batch
    lineage.step(batch, mock.Mock(is_set=lambda: False))


def _lessons(lineage: Lineage) -> tuple[services.Lesson, ...]:
    assert isinstance(lineage.learner, services.RememberingLearner)
    return lineage.learner.lessons


# As processes


def _processes(folder: Path) -> list[Line]:
    base = tiny_model.build(folder / "base", layers=1)
    broker = BrokerProcess(folder / "broker")
    started: list[Trainer] = []
    broker.start()
    try:
        return [*_rolling(folder, base, broker.address, started), *_both_alive(folder, base, broker.address, started)]
    finally:
        for trainer in started:
            trainer.end()
        broker.kill()


class Trainer(ServiceProcess):
    """One trainer process of the lineage. All trainers share a folder."""

    def __init__(self, folder: Path, base: Path, bus: str, **settings: object) -> None:
        environment = {"BASE": base, "MODEL": _MODEL, "LEASE_S": _LEASE_S, **settings}
        super().__init__(
            "trainer", folder / "data", bus, **{f"TRAINER__{name}": value for name, value in environment.items()}
        )

    def owns(self) -> bool:
        return "lineage_begins" in self.log or "lineage_continues" in self.log

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        if self.running():
            self.kill()


def _rolling(folder: Path, base: Path, bus: str, started: list[Trainer]) -> list[Line]:
    """Start the new trainer while the old one works, as in a rolling restart. The new one is ready before the old one
    stops.
    """
    old, new = (Trainer(folder, base, bus, OWNER_WAIT_S=_START_S) for _ in range(2))
    started += [old, new]
    for trainer in (old, new):
        trainer.start(ready=False)
        wait_until(trainer.healthy, _START_S, "a trainer owns the lineage, or stands by")
    early = new.owns()
    status = old.stop()
    began = time.monotonic()
    wait_until(new.owns, _TAKEOVER_S, "the second trainer owns the lineage")
    return [
        Line("a rolling restart: the old one's exit status", str(status), "0", status == 0),
        Line("a rolling restart: the new one waited", str(not early), "True", not early),
        at_most("a rolling restart: nobody owned the lineage for", time.monotonic() - began, _TAKEOVER_S, " s"),
    ]


def _both_alive(folder: Path, base: Path, bus: str, started: list[Trainer]) -> list[Line]:
    """Stop the owner with SIGSTOP for longer than its lease, and resume it when another trainer owns the lineage."""
    owner = started[-1]
    heir = Trainer(folder, base, bus, OWNER_WAIT_S=_START_S)
    third = Trainer(folder, base, bus, OWNER_WAIT_S=2 * _LEASE_S)
    started += [heir, third]
    heir.start(ready=False)
    wait_until(heir.healthy, _START_S, "the heir stands by")
    owner.signal(signal.SIGSTOP)
    began = time.monotonic()
    wait_until(heir.owns, _START_S, "the heir owns the lineage")
    took_s = time.monotonic() - began
    owner.signal(signal.SIGCONT)
    status = owner.wait(_START_S)
    third.start(ready=False)
    third_status = third.wait(_START_S)
    named = "LineageTaken" in owner.log and "stop one of them" in owner.log
    third_named = "LineageTaken" in third.log and "Stop one of them" in third.log
    saved = LineageStore(BlobStore((folder / "data" / "blobs").as_uri()), "main").read()
    return [
        at_most("a hung owner is taken over from within", took_s, _LEASE_S + _TAKEOVER_S, " s"),
        Line("the hung owner ends by name when it wakes", f"status {status}, {named}", "status 1, True", named),
        Line("whoever waits for a living owner ends by name", f"status {third_status}", "status 1", third_named),
        Line("the heir goes on", str(heir.running()), "True", heir.running() and status == third_status == 1),
        Line("the state is readable", str(saved is not None), "True", saved is not None),
    ]
