"""Charts of the steps of rollouts, stored as files in the data directory with the statistics behind each decision."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_runtime import rollout_picture
from headrace_runtime.process.logs import get_logger
from headrace_schemas.http.rollout_api import RolloutState

log = get_logger(__name__)


class ReportWriter:
    """Writer of charts. Call `write` after each step; a step that has a chart is skipped.

    A chart is drawn from the database, and `headrace rollouts report` can draw it again at any time. Without
    matplotlib, or on a full disk, only the chart is missing.
    """

    def __init__(self, folder: Path, kept_max: int) -> None:
        self._folder = folder
        self._kept_max = kept_max
        self._without_matplotlib = False

    async def write(self, state: RolloutState) -> None:
        """Draw the chart of the rollout's last step."""
        path = self._folder / name_of(state)
        if not self._kept_max or self._without_matplotlib or await asyncio.to_thread(path.exists):
            return
        try:
            drawn = await asyncio.to_thread(self._draw, state, path)
        except OSError as error:
            log.warning("report_left_out", path=str(path), error=repr(error), remedy="headrace rollouts report")
            return
        if not drawn:
            self._without_matplotlib = True
            log.info("reports_left_out", reason="matplotlib is not installed", remedy="headrace rollouts report")

    def _draw(self, state: RolloutState, path: Path) -> bool:
        drawn = rollout_picture.picture(state, rollout_picture.metric_of(state), path)
        for path_to_remove in sorted(self._folder.glob("*.png"))[: -self._kept_max]:  # names begin with the time
            path_to_remove.unlink(missing_ok=True)
        return drawn


def name_of(state: RolloutState) -> str:
    """Return the file name of the chart of the rollout's last step: time, version, number and kind of the step."""
    steps = [event for event in state.decisions if event.rollout is not None]
    last = steps[-1] if steps else None
    at = last.time if last else state.began_at
    kind = last.rollout.kind if last and last.rollout else "begin"
    return f"{at:%Y%m%dT%H%M%S}-{state.version.replace('@', '-')}-{len(steps):03}-{kind}.png"
