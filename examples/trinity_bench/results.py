"""Results of a bench: a score for each play, or the reason why there is none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace_schemas.programs.models import Play
from trinity_bench.settings import Settings

_TAIL_BYTES = 20_000
_REASON = 300


class BenchFailed(Exception):
    """Error of a bench that did not score every play, so that its result is not used."""


def scores(results: Path, plays: Sequence[Play], settings: Settings, log: Path) -> Mapping[Play, float]:
    """Return a score from 0 to 1 for each of `plays`. Raises `BenchFailed`, because Trinity's exit status does not show
    failures."""
    scores_by_play: dict[Play, float] = {}
    failed: dict[Play, str] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        try:
            result = json.loads(line)
            play = Play.model_validate(result["play"])
        except (ValueError, RecursionError) as error:  # a full disk truncates lines
            raise BenchFailed(f"a result cannot be parsed: {error}") from None
        if play not in plays or play in scores_by_play or play in failed:
            raise BenchFailed(f"task {play.task}: was not requested, or has a second result")
        if "error" in result:
            failed[play] = result["error"]
        else:
            scores_by_play[play] = _scaled(result["score"], play, settings)
    if failed:
        play, reason = next(iter(failed.items()))
        raise BenchFailed(
            f"{len(failed)} of {len(plays)} plays failed, the first one being {play.task}: {_truncate(reason)}"
        )
    missing = [play.task for play in plays if play not in scores_by_play]
    if missing:
        problem = f"{len(missing)} of {len(plays)} plays have no result, the first one being {missing[0]}"
        raise BenchFailed(f"{problem}; Trinity's log: {_truncate(last_error(log))}")
    return scores_by_play


def _scaled(value: float, play: Play, settings: Settings) -> float:
    low, high = settings.lowest, settings.highest
    if not (math.isfinite(value) and low <= value <= high):
        name = settings.metric or "reward"
        remedy = "set `lowest` and `highest` to its range, or `metric` to another metric"
        raise BenchFailed(f"task {play.task}: {name} = {value}: must be in {low:g}..{high:g}; {remedy}")
    return (value - low) / (high - low)


def last_error(log: Path) -> str:
    """Return the last error in Trinity's log, else its last line."""
    if not log.exists():
        return "nothing"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or ["nothing"])[-1]


def _truncate(text: str) -> str:
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."
