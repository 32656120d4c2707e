"""The scorer's sections of the settings file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_runtime.process.programs import VariableName
from headrace_runtime.registries import OrNameIn
from headrace_runtime.settings.sections import Port, Section, ServiceSettings
from headrace_runtime.settings.source_values import SourceValues
from headrace_schemas.values.bounds import WEIGHT_MAX
from headrace_schemas.values.ids import first_match
from headrace_scorer import INFO
from headrace_scorer.functions.loading import REWARDS
from headrace_scorer.learned.models import LearnedSettings
from headrace_scorer.reward_policy import RewardPolicy


class DriftSettings(Section):
    """Sources of the alarm for judges that agree with people less than on their first runs. It changes no reward, so it
    watches every judge."""

    judges: tuple[str, ...] = ("judge:*",)
    """Sources that are monitored. Their values are from 0 to 1."""
    people: tuple[str, ...] = ("feedback",)
    """Sources that the judges are compared with. Their values are from 0 to 1."""


Weight = Annotated[float, Field(ge=0, le=WEIGHT_MAX, allow_inf_nan=False)]


class ScorerSettings(ServiceSettings, SourceValues):
    """Reward functions, and the combination of the rewards of many sources.

    Sources are named `feedback` (or by the field `source` of feedback), `function:<name>`, `judge:<rubric>`,
    `learned:<model>`, or as a third party chooses. A setting that takes sources also takes patterns such as `judge:*`.
    """

    COMMON: ClassVar = ("functions", "weights", "required", "expected", "reward_wait_s")
    PARAMETERS: ClassVar = ("drift",)
    SHARED: ClassVar = ("host", "lease_s")

    port: Port = INFO.port
    """Port of the service's HTTP; 0 lets the system choose."""
    functions: tuple[Annotated[str, OrNameIn(REWARDS)], ...] = ()
    """Reward functions: `file.py:name`, `package.module:name`, or the name of an entry point in `headrace.rewards`."""
    function_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that one call of a reward function may take. After that its process is killed and the outcome is
    `timed_out`."""
    function_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that run reward functions, each one call at a time."""
    function_memory_mb: Annotated[int, Field(ge=64)] | None = None
    """Largest address space of such a process in MiB; unlimited when not set. Linux only."""
    function_environment: tuple[VariableName, ...] = ()
    """Environment variables that reward functions get besides those of the system (`PATH`, `HOME`, `LANG`, `TZ`, those
    of Python and of the processors). The scorer's other variables are not passed on, because they contain keys and
    passwords."""
    lease_s: Annotated[float, Field(ge=1)] = 15.0
    """With several scorers on one database: seconds after the end of a scorer until another one runs its jobs."""
    weights: Annotated[dict[str, Weight], Field(min_length=1)] = Field(default_factory=lambda: {"*": 1.0})
    """Weight of each source in the reward. The first pattern that fits counts. A source that fits none has no
    weight."""
    required: tuple[str, ...] = ()
    """Sources that must have scored before there is a reward."""
    expected: tuple[str, ...] = ()
    """Sources to wait for, besides `functions` and `required`, until each has scored, failed or abstained."""
    reward_wait_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a trajectory waits for rewards after it arrived. Later rewards revise its experiences."""
    combine: Literal["mean", "sum"] = "mean"
    """Whether a reward is the weighted mean of its sources or their weighted sum. Metrics and `parts` of feedback are
    sources, too: `feedback:tone`."""
    unrewarded_branches: bool = False
    """Whether experiences without a reward contain their tokens, for algorithms that train without one
    (`on_policy_distill`). Such experiences are as large on the bus as the others."""
    retention_s: Annotated[float, Field(gt=0)] = 604_800.0
    """Seconds for which a trajectory and its rewards are stored for revisions."""
    learned: LearnedSettings = LearnedSettings()
    drift: DriftSettings = DriftSettings()

    @model_validator(mode="after")
    def _check_required_sources(self) -> Self:
        for name in self.required:
            weight = first_match(self.weights, name) or 0.0
            if "*" not in name and not weight:
                raise ValueError(f"required source {name!r} has no weight; add it to weights")
        return self

    def policy(self, functions: Sequence[str]) -> RewardPolicy:
        """Build the rules by which rewards of several sources are combined.

        Args:
            functions: names of the loaded reward functions, which are sources.
        """
        return RewardPolicy(
            self.weights, self.required, self.expected, functions, self.combine, self.unrewarded_branches
        )
