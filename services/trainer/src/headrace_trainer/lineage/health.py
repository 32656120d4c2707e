"""Compares each step's measures with the limits of `[trainer.health]`. Pure.

A measure describes the weights that the step began with, or the step itself. A measure that stays beyond its limit for
`patience_steps` steps stops training. From the first of these steps on no version is made, so that going back to the
last one undoes them. A step without the measure (no fresh rows, no comparison with the base) does not count for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from pydantic import Field

from headrace_runtime.errors import HeadraceError
from headrace_schemas.values.base import Finite, Model
from headrace_trainer.settings import HealthSettings

NORMS_MAX = 64
"""Number of gradient norms in the running median: the last ones within the limit."""
NORMS_MIN = 8
"""Number of gradient norms that are needed before a norm can be a spike."""
_MEASURES = {
    "entropy": "entropy_min",
    "mismatch_mean": "mismatch_max",
    "effective_sample_size": "effective_sample_min",
    "kl_base": "kl_base_max",
    "guard_drop": "guard_drop_max",
    "gradient_spike": "gradient_spike_max",
}
"""Maps each measure to the setting that bounds it: from below (`_min`) or from above (`_max`)."""


class TrainingStopped(HeadraceError):
    """Raised when a step exceeds a limit of `[trainer.health]` in a process that no operator can resume, for example a
    job.
    """


class Stop(Model):
    """Reason why training has stopped: a measure with its `value` in the last step, None if that was not finite."""

    measure: str
    value: Finite | None
    limit: Finite
    steps: int
    """Steps in a row beyond the limit; 0 where the first step was refused."""
    why: str = ""
    """The whole reason of a refusal; empty otherwise."""

    @property
    def reason(self) -> str:
        """Sentence that describes the stop, with the name of the setting."""
        if self.why:
            return self.why
        setting = _MEASURES[self.measure]
        side = "below" if setting.endswith("_min") else "above"
        value = "not finite" if self.value is None else f"{self.value:.4g}"
        return (
            f"{self.measure} is {value}, {side} trainer.health.{setting} = {self.limit:g}, {self.steps} steps in a row"
        )


class Health(Model):
    """Counts of recent steps beyond the limits of `[trainer.health]`, and the stop that they caused.

    They are saved with the weights, so a crash loses none of them.
    """

    streaks: dict[str, int] = Field(default_factory=dict)
    """Number of the last steps in a row that were beyond the limit, by measure."""
    doubtful: bool = False
    """Whether the last step was beyond a limit, so that no version may be made of it."""
    gradient_norms: tuple[Finite, ...] = ()
    stopped: Stop | None = None

    def with_step(self, measured: Mapping[str, float], limits: HealthSettings) -> Health:
        """Return the health after one more step with these measures."""
        norm = measured.get("gradient_norm", 0.0)
        values = {**measured, **self._spike(norm)}
        beyond = {name: _exceeds_limit(name, values[name], limits) for name in _MEASURES if name in values}
        streaks = {name: count for name, count in self.streaks.items() if name not in beyond}
        streaks |= {name: self.streaks.get(name, 0) + 1 for name, is_beyond in beyond.items() if is_beyond}
        over = [name for name in beyond if streaks.get(name, 0) >= limits.patience_steps]
        norms = self.gradient_norms
        if norm > 0 and math.isfinite(norm) and not beyond.get("gradient_spike"):
            norms = (*norms, norm)[-NORMS_MAX:]
        return Health(
            streaks=streaks,
            doubtful=any(beyond.values()),
            gradient_norms=norms,
            stopped=_stop(over[0], values[over[0]], streaks[over[0]], limits) if over else self.stopped,
        )

    def with_refusal(self, measure: str, value: float, why: str) -> Health:
        """Return the health with a stop, because the algorithm refused a step.

        Args:
            measure: name of the measure that decided.
            value: its value.
            why: the whole reason.
        """
        finite = value if math.isfinite(value) else None
        return self.model_copy(update={"stopped": Stop(measure=measure, value=finite, limit=0.0, steps=0, why=why)})

    def after_rewind(self) -> Health:
        """Return the health after the weights were reset to another version: earlier measures no longer count."""
        return self.model_copy(update={"streaks": {}, "doubtful": False})

    def after_resume(self) -> Health:
        """Return the health after an operator resumed training: without streaks, stop and earlier gradient norms."""
        return Health()

    def with_limits(self, limits: HealthSettings) -> Health:
        """Return the health after a restart with `limits`: without the stop if its value is within the new limits."""
        stop = self.stopped
        if stop is not None and stop.why:
            return self
        value = None if stop is None else math.inf if stop.value is None else stop.value
        return (
            self
            if stop is None or value is None or _exceeds_limit(stop.measure, value, limits)
            else self.after_resume()
        )

    def _spike(self, norm: float) -> dict[str, float]:
        if not math.isfinite(norm):
            return {"gradient_spike": math.inf}
        if norm == 0 or len(self.gradient_norms) < NORMS_MIN:
            return {}
        return {"gradient_spike": norm / median(self.gradient_norms)}


def _limit(measure: str, limits: HealthSettings) -> float:
    return float(getattr(limits, _MEASURES[measure]))


def _exceeds_limit(measure: str, value: float, limits: HealthSettings) -> bool:
    limit = _limit(measure, limits)
    if limit == 0:
        return False
    return value < limit if _MEASURES[measure].endswith("_min") else value > limit


def _stop(measure: str, value: float, steps: int, limits: HealthSettings) -> Stop:
    finite = value if math.isfinite(value) else None
    return Stop(measure=measure, value=finite, limit=_limit(measure, limits), steps=steps)
