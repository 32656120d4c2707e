"""The back end `trinity`: a `Learner` whose steps are taken by Trinity-RFT, and the process of Trinity for one job.

A batch is handed over in one transaction, once its digest is durable together with that of the weights that it was cut
for (`disk.Pending`). A step counts as taken when Trinity has saved the next step number with changed weights; the exit
status of its process is ignored. A job belongs to one process of Trinity. When that process, or the trainer, has died,
there are two cases: the step was saved, and is taken over; or it was not, and the batch goes to a new job that begins
with the present weights. Later results of the old job are ignored.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.process.logs import get_logger
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_environment
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import (
    GRADIENT_FACTOR,
    Abandoned,
    Abilities,
    Frozen,
    LearnerLost,
    NotFinite,
    StepResult,
    WholeLearner,
)
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner import disk as files
from headrace_trainer.trinity_learner.configuration import (
    TrinityJob,
    TrinitySettings,
    as_yaml,
    configuration,
    context_of,
    rate_of,
    size_of,
    vocabulary_of,
)
from headrace_trainer.trinity_learner.disk import Disk, Pending, pack_weights, unpack_weights
from headrace_trainer.trinity_learner.rows import Buffer, TrinityRow, is_finite, rows_of

log = get_logger(__name__)
_POLL_S = 0.1


class JobFailed(HeadraceError):
    """Error: a job of Trinity has ended without its step. The weights are those before it."""


@dataclass(frozen=True, slots=True)
class TrinityPoint:
    """Weights between two steps, and whether Trinity has an optimizer state for them."""

    weights: str
    """Digest of the weights."""
    momentum: bool
    """Whether a checkpoint of Trinity has an optimizer for them."""


@dataclass
class RunningJob:
    """Job of Trinity whose process this learner has started."""

    job: TrinityJob
    runner: TrinityProcess
    step: int
    at: TrinityPoint


class TrinityLearner(WholeLearner):
    """Learner whose steps Trinity-RFT takes; see `headrace_trainer.learner.Learner`."""

    def __init__(self, disk: Disk, settings: TrainerSettings) -> None:
        chosen = settings.of("trinity")
        assert isinstance(chosen, TrinitySettings)
        self._disk = disk
        self._settings = settings
        self._trinity = chosen
        self._running: RunningJob | None = None
        self._lost: str | None = None
        config = json.loads((disk.base / "config.json").read_bytes())
        self._abilities = Abilities("full", vocabulary_of(config), context_of(config))
        self._rate = rate_of(settings, disk.base, config)
        self._point = TrinityPoint(disk.put_model(files.weights_in(disk.base)), momentum=False)

    @classmethod
    def open(cls, folder: Path, settings: TrainerSettings) -> TrinityLearner:
        """Open a learner from the base's folder. Trinity is started by the first step."""
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
        """Reason why training cannot continue; None while it can.

        The next step restarts a process of Trinity that has ended.
        """
        return self._lost

    def sequence_bound(self) -> int:
        return self._abilities.context

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if stop.is_set():
            raise Abandoned
        if not is_finite(batch):
            raise NotFinite
        began_s, size = time.monotonic(), size_of(self._settings, len(batch.rows))
        rows, out = rows_of(batch, self._trinity.temperature, size, 0)
        # The loss is linear in the advantages. If all were 0, Trinity would apply momentum, or change no weight at all,
        # and `_arrive` would take that for a step that failed.
        moved = bool(rows) and any(row.has_advantage for row in batch.rows if row.name not in out)
        if moved:
            self._train(batch, stop)
        seconds = time.monotonic() - began_s
        measured = {
            "gradient_norm": 0.0,  # reported by Trinity itself
            "learning_rate": self._rate,
            "step_seconds": seconds,
            GRADIENT_FACTOR: batch.token_weight,
            "tokens_per_second": sum(row.length for row in batch.rows) / max(seconds, 1e-9),
        }
        return StepResult(measured, out, moved=moved)

    def freeze(self) -> Frozen:
        lineage, at = self._settings.lineage, self._point
        about = {"lineage": lineage, "weights": at.weights, "momentum": at.momentum}
        optimizer = f"headrace trinity optimizer\n{json.dumps(about)}\n".encode()
        return Frozen(pack_weights(lineage, files.weights_in(self._disk.model(at.weights))), optimizer)

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        with self._disk.appearing(self._disk.folder / "thawed") as draft:
            unpack_weights(bytes(frozen.weights), draft)
        weights = self._disk.put_model(files.weights_in(self._disk.folder / "thawed"))
        try:
            about: dict[str, Any] = json.loads(frozen.optimizer.splitlines()[1])
        except (IndexError, ValueError, RecursionError):
            raise _other_back_end(self._settings.lineage) from None
        momentum = bool(about["momentum"]) and self._disk.checkpoint(weights).exists()
        if about["momentum"] and not momentum:
            log.warning("optimizer_starts_afresh", weights=weights, remedy="raise trainer.trinity.kept_checkpoints")
        self._move(TrinityPoint(weights, momentum))

    def load(self, folder: Path) -> None:
        self._move(TrinityPoint(self._disk.put_model(files.weights_in(folder)), momentum=False))

    def write(self, folder: Path, base: str) -> Fingerprint:
        model = self._disk.model(self._point.weights)
        for path in files.weights_in(model):
            shutil.copyfile(path, folder / path.name)
        return files.fingerprint(model)

    def fingerprint_of_base(self) -> Fingerprint:
        return files.fingerprint(self._disk.base)

    def close(self) -> None:
        self._end_job()

    # A step

    def _train(self, batch: Batch, stop: threading.Event) -> None:
        """Let Trinity train `batch`, and wait until the weights after the step are taken over.

        It raises `Abandoned`, `JobFailed`, `NotFinite` and `LearnerLost`.
        """
        digest, start = batch.digest(), self._point
        if self._find_earlier_step(digest):
            return
        going = self._job_for(batch)
        target = going.step + 1
        rows, _out = rows_of(batch, self._trinity.temperature, going.job.size, going.step)
        self._hand_over(going.job, Pending(start=start.weights, batch=digest, job=going.job.name, step=target), rows)
        if self._wait_for_step(going, target, stop) and self._take_over_step(going.job, target):
            going.step, going.at = target, self._point
            self._sweep()
            return
        why = going.runner.output_tail()
        log.warning("trinity_ended_without_its_step", job=going.job.name, step=target)
        self._end_job()
        raise JobFailed(f"job {going.job.name} of Trinity has ended without its step; the end of its output: {why}")

    def _find_earlier_step(self, digest: str) -> bool:
        """Return whether an earlier process has already trained this batch on these weights."""
        pending = self._disk.pending()
        if self._running is not None or pending is None:
            return False
        if (pending.start, pending.batch) != (self._point.weights, digest):
            return False
        job = self._job(pending.job, self._disk.base, 0)
        if files.step_of(job) < pending.step or not self._take_over_step(job, pending.step):
            return False
        log.info("trinity_step_taken_over", job=job.name, step=pending.step)
        return True

    def _job_for(self, batch: Batch) -> RunningJob:
        """Return the running job if it has the present weights and its batches are large enough; else start a new
        job."""
        going, size = self._running, size_of(self._settings, len(batch.rows))
        if going is not None and going.at == self._point and going.job.size >= size and not going.runner.ended:
            return going
        self._end_job()
        at = self._point
        model = self._disk.base if at.momentum else self._disk.model(at.weights)
        job = self._job(f"j{uuid.uuid4().hex[:12]}", model, size)
        step = self._disk.begin(job, at.weights if at.momentum else None)
        path = self._disk.jobs / f"{job.name}.yaml"
        table = configuration(self._settings, job, self._rate, self._abilities.context)
        path.write_text(as_yaml(table), encoding="utf-8")
        runner = TrinityProcess(
            self._trinity.command, path, self._disk.jobs / f"{job.name}.log", self._trinity.environment
        )
        self._running = RunningJob(job, runner, step, at)
        return self._running

    def _hand_over(self, job: TrinityJob, pending: Pending, rows: Sequence[TrinityRow]) -> None:
        self._disk.set_pending(pending)
        Buffer(job.buffer_url(self._trinity), job.buffer_name).hand_over(rows)

    def _wait_for_step(self, going: RunningJob, target: int, stop: threading.Event) -> bool:
        """Wait until Trinity has saved the step `target`. Return False if its process ended before.

        It raises `Abandoned` and `LearnerLost`.
        """
        end_s = time.monotonic() + self._trinity.step_timeout_s
        while True:
            ended = going.runner.ended  # read first, because a step that was saved before the end counts
            if files.step_of(going.job) >= target:
                return True
            if ended:
                return False
            if stop.wait(_POLL_S):
                self._lost = "a step was abandoned"
                raise Abandoned
            if time.monotonic() > end_s:
                self._lost = f"Trinity has taken no step within {self._trinity.step_timeout_s:g} s"
                raise LearnerLost(self._lost)

    def _take_over_step(self, job: TrinityJob, step: int) -> bool:
        """Adopt the weights that Trinity has saved for `step`. Return False if they are missing or have not changed.

        After an exception Trinity saves unchanged weights under the next number. Raises `NotFinite`.
        """
        checkpoint = files.checkpoint_of(job, step)
        weights = files.weights_of(checkpoint)
        if not weights or files.digest_of(weights) == self._point.weights:
            return False
        if not files.is_finite(weights):
            self._end_job()
            raise NotFinite
        digest = self._disk.put_model(weights)
        self._disk.keep(digest, checkpoint)
        self._point = TrinityPoint(digest, momentum=True)
        return True

    def _job(self, name: str, model: Path, size: int) -> TrinityJob:
        return TrinityJob(self._disk.jobs, name, model, size)

    def _move(self, point: TrinityPoint) -> None:
        if point != self._point:
            self._end_job()
        self._point = point

    def _sweep(self) -> None:
        jobs = [] if self._running is None else [self._running.job.name]
        pending = self._disk.pending()
        used = [self._point.weights, *([pending.start] if pending else [])]
        self._disk.sweep([*jobs, *([pending.job] if pending else [])], used, self._trinity.kept_checkpoints)

    def _end_job(self) -> None:
        going, self._running = self._running, None
        if going is not None:
            going.runner.close()


def _other_back_end(lineage: str) -> SettingError:
    return SettingError(
        "trainer.backend", "trinity", f"lineage {lineage} was saved by another back end; choose another trainer.lineage"
    )


_END_S = 20.0
_LOG_TAIL_BYTES = 2000
_LOG_BYTES_MAX = 16 << 20
"""Largest size of a job's log. The older half of a full log is removed."""
_LOG_PIECE_BYTES = 1 << 16
_LOG_END_S = 2.0


class TrinityProcess:
    """Process of Trinity. Its exit status is ignored, because Trinity's loop treats every exception as an end."""

    def __init__(
        self, command: Sequence[str], configuration: Path, log: Path, environment_names: Iterable[str] = ()
    ) -> None:
        """Start the process of Trinity-RFT with its configuration file.

        Raises:
            SettingError: the command cannot be started.
        """
        self._log = log
        log.touch()
        try:
            self._process = subprocess.Popen(
                parent_bound_command([*command, str(configuration)]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=program_environment(environment_names),
            )
        except OSError as error:
            raise SettingError("trainer.trinity.command", list(command), f"does not start: {error}") from None
        self._copier = threading.Thread(target=self._copy_output, name=f"log of {log.stem}", daemon=True)
        self._copier.start()

    def _copy_output(self) -> None:
        """Append the process's output to the log. Where the disk is full, output is lost and the process goes on."""
        output = self._process.stdout
        assert isinstance(output, io.BufferedReader)
        with output:
            while piece := output.read1(_LOG_PIECE_BYTES):
                with contextlib.suppress(OSError), self._log.open("r+b") as file:
                    size = file.seek(0, os.SEEK_END)
                    if size + len(piece) > _LOG_BYTES_MAX:
                        file.seek(max(0, size - _LOG_BYTES_MAX // 2))
                        newest = file.read()
                        file.seek(0)
                        file.truncate()
                        file.write(newest)
                    file.write(piece[-_LOG_BYTES_MAX // 2 :])

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def output_tail(self) -> str:
        """Return the end of the process's output."""
        if self.ended:
            self._copier.join(_LOG_END_S)  # a process that it has started may keep its output open
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process. Calling it again has no effect."""
        if self.ended:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
