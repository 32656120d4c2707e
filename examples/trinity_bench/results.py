"""What a bench has found: a score for each play, or the reason why there is none. Nothing is guessed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace_schemas.gate import Play
from trinity_bench.settings import Settings

_TAIL_BYTES = 20_000
_REASON = 300


class BenchFailed(Exception):
    """A bench has not scored every play. It counts for nobody."""


def scores(results: Path, plays: Sequence[Play], settings: Settings, log: Path) -> Mapping[Play, float]:
    """In 0..1, of each of `plays`. Raises `BenchFailed`: Trinity itself ends well whatever has failed."""
    found: dict[Play, float] = {}
    failed: dict[Play, str] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
            play = Play.model_validate(told["play"])
        except (ValueError, RecursionError) as error:  # a full disk cuts lines off
            raise BenchFailed(f"a result is none: {error}") from None
        if play not in plays or play in found or play in failed:
            raise BenchFailed(f"task {play.task}: was not asked for, or has a second result")
        if "error" in told:
            failed[play] = told["error"]
        else:
            found[play] = _scaled(told["score"], play, settings)
    if failed:
        play, reason = next(iter(failed.items()))
        raise BenchFailed(
            f"{len(failed)} of {len(plays)} plays failed, the first one being {play.task}: {_cut(reason)}"
        )
    missing = [play.task for play in plays if play not in found]
    if missing:
        told = f"{len(missing)} of {len(plays)} plays have no result, the first one being {missing[0]}"
        raise BenchFailed(f"{told}; Trinity says: {_cut(said(log))}")
    return found


def _scaled(value: float, play: Play, settings: Settings) -> float:
    low, high = settings.lowest, settings.highest
    if not (math.isfinite(value) and low <= value <= high):
        what = settings.metric or "reward"
        remedy = "set `lowest` and `highest` to what it can be, or `metric` to another one"
        raise BenchFailed(f"task {play.task}: its {what} is {value}, and not in {low:g}..{high:g}; {remedy}")
    return (value - low) / (high - low)


def said(log: Path) -> str:
    """The last error that Trinity has written, else its last line."""
    if not log.exists():
        return "nothing"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or ["nothing"])[-1]


def _cut(text: str) -> str:
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."
