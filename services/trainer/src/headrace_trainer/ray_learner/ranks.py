"""All ranks of a learner, as the trainer's process sees them. They are called together, and fail together.

The death of a rank ends a call that otherwise never returns (`Rank.alive`). So a caller that waits for the other ranks,
which may wait for the dead one, notices it within a moment.
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
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import reason_of
from headrace_runtime.storage.versions import model_files
from headrace_trainer.learner import Abandoned, LearnerLost, NotFinite
from headrace_trainer.ray_learner import RaySettings
from headrace_trainer.ray_learner.cluster import Cluster
from headrace_trainer.ray_learner.pieces import MARK, PIECE_BYTES
from headrace_trainer.ray_learner.rank import Rank, RankLocation
from headrace_trainer.settings import ComputeSettings

log = get_logger(__name__)
_COLLECTIVE_TIMEOUT_S = 300.0
"""How long ranks wait for the slowest of them in a collective operation. After that it counts as hung."""
_CALL_TIMEOUT_S = 3600.0
"""Longest duration of a step, or of any other call of the ranks."""

_POLL_S = 0.2
_DURING_STEPS = "during_steps"
"""The thread of a rank that writes copies."""
_ON_DISK = frozenset({"write_copy"})
"""Methods that fail where a disk is full, in one rank alone, and may be called again."""


class Ranks:
    """Handle of all ranks of a learner. Not safe for concurrent use, except `failure`."""

    def __init__(self, settings: RaySettings, compute: ComputeSettings) -> None:
        """Start the ranks and connect them. Blocks. Raises `SettingError`, `Unavailable` and `LearnerLost`."""
        self._settings = settings
        self._lost: str | None = None
        self._limit_s = settings.start_timeout_s
        self._actors: list[Any] = []
        self._alive: list[Any] = []
        self._group: PlacementGroup | None = None
        self._cluster = Cluster(settings, settings.ranks * compute.threads)
        try:
            self._start(compute)
            self.locations: list[RankLocation] = self.all("place")
            self._meet("cuda" if self._gpus(compute) else "cpu")
            self._limit_s = _CALL_TIMEOUT_S
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str | None:
        """Reason why the ranks can no longer be called, or None. It may be read from any thread."""
        if self._lost is None and self._alive:
            self._lost = self._death()
        return self._lost

    def all(self, method: str, *arguments: Any, stop: threading.Event | None = None) -> list[Any]:
        """Call a method of each rank and return the results.

        Raises:
            SettingError: A rank has raised it.
            NotFinite: Every rank has raised it.
            LearnerLost: A rank has died, hangs, or failed otherwise. No further call is possible.
            Abandoned: `stop` was set. No further call is possible.
        """
        return self.each(method, [arguments] * len(self._actors), stop=stop)

    def each(self, method: str, arguments: list[Any], *, stop: threading.Event | None = None) -> list[Any]:
        """Call a method of all ranks concurrently, and return the results in the order of the ranks.

        Args:
            method: name of the method.
            arguments: for each rank the method's argument.
            stop: event that ends the wait.

        Raises:
            LearnerLost: a rank has failed.
        """
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._marking_lost(method):
            calls = [
                getattr(actor, method).remote(*values) for actor, values in zip(self._actors, arguments, strict=True)
            ]
            self._wait(method, calls, stop)
            return list(ray.get(calls))

    def call_rank(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of a single rank, in which it does not wait for other ranks, and return the result."""
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._marking_lost(method):
            call = getattr(self._actors[number], method).remote(*arguments)
            self._wait(method, [call], None)
            return ray.get(call)

    def shared(self, value: Any) -> Any:
        """Return a Ray reference to `value`, which is sent to each machine only once."""
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._marking_lost("put"):
            return ray.put(value)

    @contextlib.contextmanager
    def provide_files(self, folder: Path) -> Iterator[list[str]]:
        """Open a context with the path of a folder for each rank that contains the files of `folder`.

        It is `folder` itself if the rank has access to it, otherwise a copy that the ranks of its machine share.
        """
        with marked(folder) as mark:
            has_access = self.all("sees", str(folder), mark)
        nodes = [location.node for location in self.locations]
        owners = [number if has_access[number] else nodes.index(node) for number, node in enumerate(nodes)]
        copies: dict[int, str] = {}
        try:
            copies |= {
                number: str(self.call_rank(number, "folder"))
                for number in sorted(set(owners))
                if not has_access[number]
            }
            for path in model_files(folder) if copies else ():
                for piece in _pieces(path):
                    reference = self.shared(piece)
                    for number, rank_folder in copies.items():
                        self.call_rank(number, "put", rank_folder, path.relative_to(folder).as_posix(), reference)
            yield [copies.get(owner, str(folder)) for owner in owners]
        finally:
            for number, rank_folder in copies.items():
                self._forget(number, rank_folder)

    def call_during_steps(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank that may run during a step, and return the results in the order of the ranks.

        Another thread than that of other calls may call it, one call at a time. If a rank raises `OSError`, it is
        raised here, and the ranks can still be called.
        """
        return self._call_during_steps(method, self._actors, arguments)

    def call_rank_during_steps(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method in one rank that may run during a step, and return its result."""
        return self._call_during_steps(method, self._actors[number : number + 1], arguments)[0]

    def _call_during_steps(self, method: str, actors: list[Any], arguments: tuple[Any, ...]) -> list[Any]:
        if self._lost is not None:
            raise LearnerLost(self._lost)
        with self._marking_lost(method):
            calls = [
                getattr(actor, method).options(concurrency_group=_DURING_STEPS).remote(*arguments) for actor in actors
            ]
            self._wait(method, calls, None)
            return list(ray.get(calls))

    def close(self) -> None:
        """Kill the ranks. Calling it again has no effect."""
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
        actor: Any = ray.remote(concurrency_groups={_DURING_STEPS: 1})(Rank)  # type: ignore[call-overload]
        for number in range(count):
            bundle_strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            resources = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": bundle_strategy,
            }
            options = actor.options(max_concurrency=2, max_restarts=0, max_task_retries=0, **resources)
            self._actors.append(options.remote(number, count, _COLLECTIVE_TIMEOUT_S))
        self._alive = [rank_actor.alive.remote() for rank_actor in self._actors]

    def _meet(self, device: str) -> None:
        address = self.locations[0].address
        port = self.call_rank(0, "meet", address)
        self.each("join", [(location.address, address, port, device) for location in self.locations])

    def _gpus(self, compute: ComputeSettings) -> bool:
        """Return whether each rank has a GPU of its own."""
        if compute.device == "auto":
            return bool(_resources().get("GPU", 0) >= self._settings.ranks)
        return compute.device != "cpu"

    def _wait(self, method: str, calls: list[Any], stop: threading.Event | None) -> None:
        """Wait until all calls have returned or one has failed, for which the others may wait forever.

        `NotFinite` does not count as failure, because every rank raises it.
        """
        limit = self._limit_s
        end_s = time.monotonic() + limit
        waiting = list(calls)
        while waiting:
            finished, waiting = ray.wait(waiting, timeout=_POLL_S)
            for call in finished:
                self._raise_error(call)
            if waiting and (why := self._death()) is not None:
                raise LearnerLost(why)
            if stop is not None and stop.is_set():
                raise Abandoned
            if waiting and time.monotonic() > end_s:
                raise LearnerLost(f"a rank has not answered {method} within {limit:g} s")

    @staticmethod
    def _raise_error(call: Any) -> None:
        """Raise the error of a call, except `NotFinite`, which every rank raises."""
        try:
            ray.get(call)
        except RayTaskError as error:
            if not isinstance(error.cause, NotFinite):
                raise

    def _death(self) -> str | None:
        try:
            ended, _ = ray.wait(self._alive, timeout=0, fetch_local=False)
            numbers = [self._alive.index(call) for call in ended]
        except (RayError, ConnectionError) as error:
            return f"Ray does not answer: {error}"
        return f"rank {', '.join(map(str, numbers))} of {self._settings.ranks} has died" if numbers else None

    @contextlib.contextmanager
    def _marking_lost(self, method: str) -> Iterator[None]:
        """Open a context for calls to ranks. Errors after which the ranks are unusable become `LearnerLost`."""
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
            if isinstance(error.cause, SettingError):  # raised in one rank, while others may wait for it
                self._lost = str(error.cause)
                raise error.cause from None
            log.error("rank_failed", method=method, error=str(error))
            cause = reason_of(error.cause if isinstance(error.cause, Exception) else error)
            self._lost = self._death() or f"{method} has failed in a rank: {cause}"
            raise LearnerLost(self._lost) from error
        except (RayError, ConnectionError) as error:
            self._lost = self._death() or f"{method} was not answered: {error}"
            raise LearnerLost(self._lost) from error

    def _forget(self, number: int, folder: str) -> None:
        if self._lost is None:
            self.call_rank(number, "forget", folder)


def _resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Open a context in which `folder` has the file `MARK` with random content, by which ranks recognise the folder."""
    mark = uuid.uuid4().hex
    (folder / MARK).write_text(mark, encoding="ascii")
    try:
        yield mark
    finally:
        (folder / MARK).unlink(missing_ok=True)


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in pieces. An empty file yields one empty piece, so that it is sent, too."""
    with path.open("rb") as file:
        yield file.read(PIECE_BYTES)
        while piece := file.read(PIECE_BYTES):
            yield piece
