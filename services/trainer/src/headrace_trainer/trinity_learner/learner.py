"""The back end `trinity`: a `Learner` whose steps are taken by Trinity-RFT.

A batch is handed over once its name is durable beside the weights that it was cut for (`disk.Pending`), in one
transaction. Trinity's next step number, and weights that have moved, are what counts as trained; how its process ended
is not asked. A job belongs to one process of Trinity's. When that process, or ours, has died, there are two cases: its
step is there, and is taken over; or it is not, and the batch goes to a new job that begins where the weights are. What
the old job may still do is looked at by nobody.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_runtime.errors import SettingError
from headrace_runtime.logs import get_logger
from headrace_schemas.manifest import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import GRADIENT_FACTOR, Abandoned, Abilities, LearnerLost, NotFinite, StepResult
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner import disk as files
from headrace_trainer.trinity_learner.buffer import Buffer
from headrace_trainer.trinity_learner.configuration import (
    TrinityJob,
    as_yaml,
    configuration,
    context_of,
    rate_of,
    size_of,
    vocabulary_of,
)
from headrace_trainer.trinity_learner.disk import Disk, Pending
from headrace_trainer.trinity_learner.packed import packed, unpacked
from headrace_trainer.trinity_learner.rows import Handed, finite, rows_of
from headrace_trainer.trinity_learner.runner import TrinityProcess
from headrace_trainer.trinity_learner.settings import TrinitySettings
from headrace_trainer.whole import Frozen, WholeLearner

log = get_logger(__name__)
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class TrinityPoint:
    """Where training is."""

    weights: str
    """Their digest."""
    momentum: bool
    """Whether Trinity has kept an optimizer for them."""


@dataclass
class Going:
    """A job whose process we have started."""

    job: TrinityJob
    runner: TrinityProcess
    step: int
    at: TrinityPoint


class TrinityLearner(WholeLearner):
    """See `headrace_trainer.learner.Learner`."""

    def __init__(self, disk: Disk, settings: TrainerSettings) -> None:
        chosen = settings.of("trinity")
        assert isinstance(chosen, TrinitySettings)
        self._disk = disk
        self._settings = settings
        self._chosen = chosen
        self._going: Going | None = None
        self._lost: str | None = None
        config = json.loads((disk.base / "config.json").read_bytes())
        self._abilities = Abilities("full", vocabulary_of(config), context_of(config))
        self._rate = rate_of(settings, disk.base, config)
        self._at = TrinityPoint(disk.put_model(files.weights_in(disk.base)), momentum=False)

    @classmethod
    def open(cls, folder: Path, settings: TrainerSettings) -> TrinityLearner:
        """From the base's folder. Trinity is started by the first step."""
        chosen = settings.of("trinity")
        assert isinstance(chosen, TrinitySettings)
        disk = Disk(Path(chosen.folder) / settings.lineage)
        disk.put_base(folder)
        return cls(disk, settings)

    @property
    def abilities(self) -> Abilities:
        return self._abilities

    @property
    def failure(self) -> str | None:
        """A process of Trinity's that has ended is started again by the next step."""
        return self._lost

    def sequence_bound(self) -> int:
        return self._abilities.context

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if stop.is_set():
            raise Abandoned
        if not finite(batch):
            raise NotFinite
        began_s, size = time.monotonic(), size_of(self._settings, len(batch.rows))
        rows, out = rows_of(batch, self._chosen.temperature, size, 0)
        # The loss is linear in the advantages. Without any, Trinity would spend momentum, or change no weight at all,
        # which `_arrive` takes for a step that was not taken.
        moved = bool(rows) and any(row.has_advantage for row in batch.rows if row.name not in out)
        if moved:
            self._train(batch, stop)
        seconds = time.monotonic() - began_s
        measured = {
            "gradient_norm": 0.0,  # Trinity's own pages have it
            "learning_rate": self._rate,
            "step_seconds": seconds,
            GRADIENT_FACTOR: batch.token_weight,
            "tokens_per_second": sum(row.length for row in batch.rows) / max(seconds, 1e-9),
        }
        return StepResult(measured, out, moved=moved)

    def freeze(self) -> Frozen:
        lineage, at = self._settings.lineage, self._at
        about = {"lineage": lineage, "weights": at.weights, "momentum": at.momentum}
        optimizer = f"headrace trinity optimizer\n{json.dumps(about)}\n".encode()
        return Frozen(packed(lineage, files.weights_in(self._disk.model(at.weights))), optimizer)

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        with self._disk.appearing(self._disk.folder / "thawed") as draft:
            unpacked(bytes(frozen.weights), draft)
        weights = self._disk.put_model(files.weights_in(self._disk.folder / "thawed"))
        try:
            about: dict[str, Any] = json.loads(frozen.optimizer.splitlines()[1])
        except (IndexError, ValueError, RecursionError):
            raise _other_back_end(self._settings.lineage) from None
        momentum = bool(about["momentum"]) and self._disk.kept(weights).exists()
        if about["momentum"] and not momentum:
            log.warning("optimizer_starts_afresh", weights=weights, remedy="raise trainer.trinity.kept_checkpoints")
        self._move(TrinityPoint(weights, momentum))

    def load(self, folder: Path) -> None:
        self._move(TrinityPoint(self._disk.put_model(files.weights_in(folder)), momentum=False))

    def write(self, folder: Path, base: str) -> Fingerprint:
        model = self._disk.model(self._at.weights)
        for path in files.weights_in(model):
            (folder / path.name).write_bytes(path.read_bytes())
        return _fingerprint(model)

    def fingerprint_of_base(self) -> Fingerprint:
        return _fingerprint(self._disk.base)

    def close(self) -> None:
        self._end_job()

    # A step

    def _train(self, batch: Batch, stop: threading.Event) -> None:
        """Until the weights are those after `batch`."""
        digest, start = batch.digest(), self._at
        if self._taken_over(digest):
            return
        why = ""
        for _ in range(self._chosen.attempts):
            going = self._job_for(batch)
            target = going.step + 1
            rows, _out = rows_of(batch, self._chosen.temperature, going.job.size, going.step)
            self._hand_over(
                going.job, Pending(start=start.weights, batch=digest, job=going.job.name, step=target), rows
            )
            if self._reached(going, target, stop) and self._arrive(going.job, target):
                going.step, going.at = target, self._at
                self._sweep()
                return
            why = going.runner.said()
            log.warning("trinity_ended_without_its_step", job=going.job.name, step=target)
            self._end_job()
        self._lost = f"Trinity has not taken the step in {self._chosen.attempts} jobs; the last one said: {why}"
        raise LearnerLost(self._lost)

    def _taken_over(self, digest: str) -> bool:
        """Whether this very batch was trained, on these very weights, by a process that started before us."""
        pending = self._disk.pending()
        if self._going is not None or pending is None:
            return False
        if (pending.start, pending.batch) != (self._at.weights, digest):
            return False
        job = self._job(pending.job, self._disk.base, 0)
        if files.step_of(job) < pending.step or not self._arrive(job, pending.step):
            return False
        log.info("trinity_step_taken_over", job=job.name, step=pending.step)
        return True

    def _job_for(self, batch: Batch) -> Going:
        """The one that goes, where it is at our point and has room; else a new one."""
        going, size = self._going, size_of(self._settings, len(batch.rows))
        if going is not None and going.at == self._at and going.job.size >= size and not going.runner.ended:
            return going
        self._end_job()
        at = self._at
        model = self._disk.base if at.momentum else self._disk.model(at.weights)
        job = self._job(f"j{uuid.uuid4().hex[:12]}", model, size)
        step = self._disk.begin(job, at.weights if at.momentum else None)
        path = self._disk.jobs / f"{job.name}.yaml"
        found = configuration(self._settings, job, self._rate, self._abilities.context)
        path.write_text(as_yaml(found), encoding="utf-8")
        runner = TrinityProcess(
            self._chosen.command, path, self._disk.jobs / f"{job.name}.log", self._chosen.environment
        )
        self._going = Going(job, runner, step, at)
        return self._going

    def _hand_over(self, job: TrinityJob, pending: Pending, rows: Sequence[Handed]) -> None:
        self._disk.set_pending(pending)
        Buffer(job.buffer_url(self._chosen), job.buffer_name).hand_over(rows)

    def _reached(self, going: Going, target: int, stop: threading.Event) -> bool:
        """Whether the step number came. Raises `Abandoned` and `LearnerLost`."""
        end_s = time.monotonic() + self._chosen.step_timeout_s
        while True:
            ended = going.runner.ended  # asked first: what it has saved before its end counts
            if files.step_of(going.job) >= target:
                return True
            if ended:
                return False
            if stop.wait(_LOOK_S):
                self._lost = "a step was abandoned"
                raise Abandoned
            if time.monotonic() > end_s:
                self._lost = f"Trinity has taken no step within {self._chosen.step_timeout_s:g} s"
                raise LearnerLost(self._lost)

    def _arrive(self, job: TrinityJob, step: int) -> bool:
        """Make the weights of this step ours, if they are there and have moved: after an exception Trinity saves what
        it had under the next number. Raises `NotFinite`."""
        checkpoint = files.checkpoint_of(job, step)
        weights = files.weights_of(checkpoint)
        if not weights or files.digest_of(weights) == self._at.weights:
            return False
        from headrace_trainer.trinity_learner.weights import finite as numbers  # seconds, for torch

        if not numbers(weights):
            self._end_job()
            raise NotFinite
        digest = self._disk.put_model(weights)
        self._disk.keep(digest, checkpoint)
        self._at = TrinityPoint(digest, momentum=True)
        return True

    def _job(self, name: str, model: Path, size: int) -> TrinityJob:
        return TrinityJob(self._disk.jobs, name, model, size)

    def _move(self, point: TrinityPoint) -> None:
        if point != self._at:
            self._end_job()
        self._at = point

    def _sweep(self) -> None:
        jobs = [] if self._going is None else [self._going.job.name]
        pending = self._disk.pending()
        used = [self._at.weights, *([pending.start] if pending else [])]
        self._disk.sweep([*jobs, *([pending.job] if pending else [])], used, self._chosen.kept_checkpoints)

    def _end_job(self) -> None:
        going, self._going = self._going, None
        if going is not None:
            going.runner.close()


def _fingerprint(folder: Path) -> Fingerprint:
    from headrace_trainer.trinity_learner.weights import fingerprint  # seconds, for torch

    return fingerprint(folder)


def _other_back_end(lineage: str) -> SettingError:
    return SettingError(
        "trainer.backend", "trinity", f"lineage {lineage} was saved by another back end; choose another trainer.lineage"
    )
