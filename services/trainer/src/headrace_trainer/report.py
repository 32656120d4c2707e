"""Reports the progress of training: TensorBoard, Prometheus, and one line per step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from torch.utils.tensorboard import SummaryWriter

from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import disk
from headrace_schemas import ModelEvent
from headrace_schemas.values.text import printable
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.metrics import MEASURES, STEP_SECONDS, STEPS, STOPPED, VERSION_NUMBER

log = get_logger(__name__)
_LINE = {
    "reward_mean": "reward {:.3f}",
    "kl_behaviour": "kl {:.1e}",
    "clip_fraction": "clipped {:.1%}",
    "truncated_fraction": "truncated {:.1%}",
    "entropy": "entropy {:.2f}",
    "gradient_norm": "gradient {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


REMEDY = "see docs/algorithms.md; POST /resume to the trainer, or change the limit and start it again"
_DECISIONS = frozenset({"evaluated", "promoted", "rejected", "rolled_back", "withdrawn"})
_STATISTICS = frozenset({"score", "champion_score", "difference", "standard_error"})


def _escape(text: str) -> str:
    """Return untrusted text with its console markup escaped and without terminal control sequences."""
    return escape(printable(text, 1_000))


class _Board:
    """Writer of TensorBoard files. While the disk is full, it discards points and raises no error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._left_out = 0

    def points(self, values: Mapping[str, float], step: int) -> None:
        try:
            if self._writer is None:
                self._writer = SummaryWriter(str(self._folder))
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            if not disk.is_full(error):
                raise
            self._leave_out(len(values))
        else:
            if self._left_out:
                log.warning("tensorboard_goes_on", left_out=self._left_out)
            self._left_out = 0

    def text(self, name: str, text: str, step: int) -> None:
        try:
            if self._writer is None:
                self._writer = SummaryWriter(str(self._folder))
            self._writer.add_text(name, text, step)
            self._writer.flush()
        except OSError as error:
            if not disk.is_full(error):
                raise
            self._leave_out(1)

    def _leave_out(self, count: int) -> None:
        if not self._left_out:
            log.error("tensorboard_left_out", error=str(disk.full_error(self._folder)))
        self._left_out += count
        self._writer = None  # it cannot be used again after an error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Reporter:
    """Reporter of the progress of one training process.

    On a terminal the line per step is for people, otherwise it is a structured log line.
    """

    def __init__(self, folder: Path) -> None:
        self._board = _Board(folder)
        self._console = Console(stderr=True) if sys.stderr.isatty() else None

    def report_step(self, measured: Mapping[str, float], state: LineageState) -> None:
        """Publish the measurements of one training step: to the metrics, TensorBoard, and the log or the terminal.

        Args:
            measured: measurements by name, as `Lineage.step` returned them.
        """
        STEPS.set(state.steps)
        STEP_SECONDS.observe(measured["step_seconds"])
        points = {name if "/" in name else f"step/{name}": value for name, value in measured.items()}
        self._board.points(points, state.steps)
        for name, value in measured.items():
            if not name.startswith("reward/"):  # task names have no bound
                MEASURES.labels(name).set(value)
        number = state.history[state.history.head].number
        if self._console is None:
            fields = {name: round(value, 6) for name, value in measured.items() if "/" not in name}
            log.info("step", step=state.steps, version_number=number, waiting=len(state.waiting), **fields)
        else:
            parts = [text.format(measured[name]) for name, text in _LINE.items() if name in measured]
            self._console.print(
                f"[bold]step {state.steps}[/] on v{number}  {'  '.join(parts)}  waiting {len(state.waiting)}",
                highlight=False,
                soft_wrap=True,
            )

    def report_version(self, version: str, number: int, step: int) -> None:
        """Report a new version, once it is durable."""
        VERSION_NUMBER.set(number)
        self._board.points({"version": number}, step)
        if self._console is None:
            log.info("version", version=version, number=number)
        else:
            self._console.print(f"[bold green]version {number}[/]  {version}", highlight=False)

    def report_stop(self, reason: str | None, state: LineageState) -> None:
        """Report that training has stopped for `reason`, or continues when it is None. Called also at a start."""
        STOPPED.set(reason is not None)
        version = state.history.head
        self._board.text("health", f"stopped: {reason}; the weights are those of {version}" if reason else "goes on",
                         state.steps)  # fmt: skip
        if reason is None:
            log.warning("training_goes_on", version=version)
        elif self._console is None:
            log.error("training_stopped", reason=reason, version=version, remedy=REMEDY)
        else:
            self._console.print(
                f"[bold red]training is stopped[/]: {_escape(reason)}. The weights are those of {version}; {REMEDY}",
                highlight=False,
            )

    def report_decision(self, event: ModelEvent, number: int, step: int) -> None:
        """Report a decision of the registry about a version of the lineage.

        Args:
            number: number of the version in the lineage.
            step: present step of training.
        """
        if event.decision not in _DECISIONS:
            return
        points = {f"registry/{name}": value for name, value in event.statistics.items() if name in _STATISTICS}
        self._board.points({f"registry/{event.decision}": number, **points}, step)
        if self._console is not None:
            reason = f": {_escape(event.reason)}" if event.reason else ""
            self._console.print(f"[bold]{event.decision}[/] v{number} {event.version}{reason}", highlight=False)

    def close(self) -> None:
        self._board.close()


def report_decision(reporter: Reporter, event: ModelEvent, state: LineageState) -> None:
    """Report a decision of the registry if it is about a version of the lineage."""
    if event.version in state.history:
        reporter.report_decision(event, state.history[event.version].number, state.steps)
