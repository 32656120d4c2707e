"""All ranks of a learner, as the trainer's process sees them: asked at once, and lost at once.

A rank that has died shows itself by the call that never ends in it (`Rank.alive`), so who waits for an answer of the
others, who wait for it in turn, hears of it within a moment.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace_runtime.errors import SettingError
from headrace_runtime.versions import model_files
from headrace_trainer.learner import Abandoned, LearnerLost, NotFinite
from headrace_trainer.ray_learner.cluster import Cluster
from headrace_trainer.ray_learner.pieces import MARK, PIECE_BYTES
from headrace_trainer.ray_learner.rank import Place, Rank
from headrace_trainer.ray_learner.settings import RaySettings
from headrace_trainer.settings import ComputeSettings

_LOOK_S = 0.2
_BESIDE = "beside"
"""The thread of a rank that writes copies."""
_ON_DISK = frozenset({"write_copy"})
"""What fails where a disk is full, in one rank alone, and can be asked again."""


class Ranks:
    """Not safe for concurrent use, but for `failure`."""

    def __init__(self, settings: RaySettings, compute: ComputeSettings) -> None:
        """Starts them and lets them find each other. Blocks. Raises `SettingError`, `Unavailable`, `LearnerLost`."""
        self._settings = settings
        self._lost: str | None = None
        self._limit_s = settings.start_timeout_s
        self._actors: list[Any] = []
        self._alive: list[Any] = []
        self._group: PlacementGroup | None = None
        self._cluster = Cluster(settings, settings.ranks * compute.threads)
        try:
            self._start(compute)
            self.places: list[Place] = self.all("place")
            self._meet("cuda" if self._gpus(compute) else "cpu")
            self._limit_s = settings.call_timeout_s
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str | None:
        """Why they cannot go on. Asked from any thread."""
        if self._lost is None and self._alive:
            self._lost = self._death()
        return self._lost

    def all(self, method: str, *arguments: Any, stop: threading.Event | None = None) -> list[Any]:
        """What each rank answers. Raises `SettingError` and `NotFinite` as a rank does, `LearnerLost` when one has
        died, hangs, or fails otherwise, and `Abandoned` soon after `stop` is set; nothing can be asked after these
        two."""
        return self.each(method, [arguments] * len(self._actors), stop=stop)

    def each(self, method: str, arguments: list[Any], *, stop: threading.Event | None = None) -> list[Any]:
        """The same, with arguments of its own for each rank."""
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._losing(method):
            calls = [getattr(actor, method).remote(*own) for actor, own in zip(self._actors, arguments, strict=True)]
            self._wait(method, calls, stop)
            return list(ray.get(calls))

    def one(self, number: int, method: str, *arguments: Any) -> Any:
        """What this rank answers, of what needs no other."""
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._losing(method):
            call = getattr(self._actors[number], method).remote(*arguments)
            self._wait(method, [call], None)
            return ray.get(call)

    def shared(self, thing: Any) -> Any:
        """A reference to `thing`, which goes to each machine once."""
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._losing("put"):
            return ray.put(thing)

    @contextlib.contextmanager
    def given(self, folder: Path) -> Iterator[list[str]]:
        """For each rank the folder in which it finds these files while inside: this one, where it sees it; else one
        that ranks of its machine share."""
        with marked(folder) as mark:
            seen = self.all("sees", str(folder), mark)
        nodes = [place.node for place in self.places]
        firsts = [number if seen[number] else nodes.index(node) for number, node in enumerate(nodes)]
        made: dict[int, str] = {}
        try:
            made |= {one: str(self.one(one, "folder")) for one in sorted(set(firsts)) if not seen[one]}
            for path in model_files(folder) if made else ():
                for piece in _pieces(path):
                    sent = self.shared(piece)
                    for number, there in made.items():
                        self.one(number, "put", there, path.relative_to(folder).as_posix(), sent)
            yield [made.get(first, str(folder)) for first in firsts]
        finally:
            for number, there in made.items():
                self._forget(number, there)

    def beside(self, method: str, *arguments: Any) -> list[Any]:
        """The same as `all`, of what ranks do while they take steps. May be asked from another thread than the rest,
        one at a time. Raises `OSError` as a rank does: then nothing is lost."""
        return self._beside(method, self._actors, arguments)

    def one_beside(self, number: int, method: str, *arguments: Any) -> Any:
        return self._beside(method, self._actors[number : number + 1], arguments)[0]

    def _beside(self, method: str, actors: list[Any], arguments: tuple[Any, ...]) -> list[Any]:
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._losing(method):
            calls = [getattr(actor, method).options(concurrency_group=_BESIDE).remote(*arguments) for actor in actors]
            self._wait(method, calls, None)
            return list(ray.get(calls))

    def close(self) -> None:
        """End them. Again does nothing."""
        actors, self._actors, self._alive = self._actors, [], []
        with contextlib.suppress(RayError, ConnectionError):
            for actor in actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._group = None
        self._lost = self._lost or "it is closed"
        self._cluster.leave()

    def _start(self, compute: ComputeSettings) -> None:
        count, bundle = self._settings.ranks, {"CPU": float(compute.threads)}
        if self._gpus(compute):
            bundle["GPU"] = 1.0
        self._group = placement_group([bundle] * count, strategy="PACK")
        if not self._group.wait(self._settings.start_timeout_s):
            remedy = f"the cluster has no room for so many with {bundle} each; it has {_resources()}"
            raise SettingError("trainer.ray.ranks", count, remedy)
        actor: Any = ray.remote(concurrency_groups={_BESIDE: 1})(Rank)  # type: ignore[call-overload]
        for number in range(count):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            how = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": place}
            chosen = actor.options(max_concurrency=2, max_restarts=0, max_task_retries=0, **how)
            self._actors.append(chosen.remote(number, count, self._settings.collective_timeout_s))
        self._alive = [one.alive.remote() for one in self._actors]

    def _meet(self, device: str) -> None:
        address = self.places[0].address
        port = self.one(0, "meet", address)
        self.each("join", [(place.address, address, port, device) for place in self.places])

    def _gpus(self, compute: ComputeSettings) -> bool:
        """Whether each rank has a GPU to itself."""
        if compute.device == "auto":
            return bool(_resources().get("GPU", 0) >= self._settings.ranks)
        return compute.device != "cpu"

    def _wait(self, method: str, calls: list[Any], stop: threading.Event | None) -> None:
        """Until all have answered, or one has failed: the others may wait for it then, and are not waited for. What is
        not finite is so in every rank."""
        limit = self._limit_s
        end_s = time.monotonic() + limit
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_LOOK_S)
            for call in done:
                self._look(call)
            if waiting and (why := self._death()) is not None:
                raise LearnerLost(why)
            if stop is not None and stop.is_set():
                raise Abandoned
            if waiting and time.monotonic() > end_s:
                raise LearnerLost(f"a rank has not answered {method} within {limit:g} s")

    @staticmethod
    def _look(call: Any) -> None:
        """Raises what the call has raised, unless every rank raises it."""
        try:
            ray.get(call)
        except RayTaskError as error:
            if not isinstance(error.cause, NotFinite):
                raise

    def _death(self) -> str | None:
        try:
            ended, _ = ray.wait(self._alive, timeout=0, fetch_local=False)
            numbers = [self._alive.index(one) for one in ended]
        except (RayError, ConnectionError) as error:
            return f"Ray does not answer: {error}"
        return f"rank {', '.join(map(str, numbers))} of {self._settings.ranks} has died" if numbers else None

    @contextlib.contextmanager
    def _losing(self, method: str) -> Iterator[None]:
        """What a rank has raised, as itself; and whatever else, as a loss."""
        try:
            yield
        except LearnerLost as error:
            self._lost = str(error)
            raise
        except Abandoned:
            self._lost = "a step was abandoned"
            raise
        except RayTaskError as error:
            if isinstance(error.cause, NotFinite):
                raise error.cause from None
            if isinstance(error.cause, OSError) and method in _ON_DISK:
                raise error.cause from None
            if isinstance(error.cause, SettingError):  # in one rank, while others may wait for it
                self._lost = str(error.cause)
                raise error.cause from None
            self._lost = self._death() or f"{method} has failed in a rank: {error}"
            raise LearnerLost(self._lost) from error
        except (RayError, ConnectionError) as error:
            self._lost = self._death() or f"{method} was not answered: {error}"
            raise LearnerLost(self._lost) from error

    def _forget(self, number: int, folder: str) -> None:
        if self._lost is None:
            self.one(number, "forget", folder)


def _resources() -> dict[str, float]:
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """With a mark by which a rank can tell that it sees the same folder."""
    mark = uuid.uuid4().hex
    (folder / MARK).write_text(mark, encoding="ascii")
    try:
        yield mark
    finally:
        (folder / MARK).unlink(missing_ok=True)


def _pieces(path: Path) -> Iterator[bytes]:
    """At least one, so that an empty file arrives too."""
    with path.open("rb") as file:
        yield file.read(PIECE_BYTES)
        while piece := file.read(PIECE_BYTES):
            yield piece
