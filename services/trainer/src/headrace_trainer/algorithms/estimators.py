"""Advantage estimators by name: the entry points `headrace.advantages` of installed packages.

The built-in estimators are announced in this package's own `pyproject.toml`. Another package can add an estimator
without a change here: a function like those below, marked with `estimator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_runtime.registries import Registry
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms import advantages
from headrace_trainer.algorithms.advantages import Advantages, Floats
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.presets import NOTHING, REPLIES, REWARDS, Needs, Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


@dataclass(frozen=True, slots=True)
class Reply:
    """The user's next message after an answer of the model, in a conversation that went on."""

    turn_id: str
    choice: int
    """With `turn_id`: the answer that the user replied to."""
    answer: str
    answer_ids: tuple[int, ...]
    """The answer, as text and as the engine sampled it."""
    text: str
    """The user's message, without the chat template's text around it."""
    token_ids: tuple[int, ...]
    """The message as the engine received it: with the chat template's tokens, and the opening of the next answer."""
    turn_reward: float | None = None
    """The reward of the answer's turn, None where it has none."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Inputs of an estimator: the branches and graded answers of a batch that are trained for the first time.

    Fields with the suffix `_B` have one entry for each branch or answer, in the same order.
    """

    rewards_B: Floats
    """The reward of each branch (as `worth` maps it), and the grade of each answer's reply."""
    weights_B: Floats
    """The share of each in its run."""
    runs_B: Sequence[str]
    tasks_B: Sequence[str | None]
    turns_B: Sequence[Sequence[float | None]] = ()
    """The reward of each span's turn, in the order of the spans, for each branch, or None where the turn has none. For
    an answer it is empty."""
    replies_B: Sequence[Reply | None] = ()
    """The reply to each answer, None for a branch. Empty for an algorithm without `Signals.replies`."""

    def groups(self) -> list[str]:
        """Return the group of each branch: its task, or its run where it has no task."""
        return [task or run for task, run in zip(self.tasks_B, self.runs_B, strict=True)]


HISTORY_MIN = 1.0
"""Runs of a task (decayed, including others of the batch) from which on it has a baseline; before that its runs have no
advantage."""
TASKS_MIN = 16
"""Number of tasks above which tasks count as not repeating if most of them were seen once: then a task without other
runs is compared with all tasks."""
Compute = Callable[[AdvantageInputs, Baselines, Decay, "AdvantageSettings"], tuple[Advantages, Baselines]]
"""Pure, and equal on every machine. It returns advantages in the batch's order, and the baselines with the batch
in them."""
Worth = Callable[[float, "AdvantageSettings"], float]
"""Maps a reward to the value that is compared. An experience with the value 0 is not trained."""
Credit = Callable[[float, Sequence[float | None], float, float, "AdvantageSettings"], tuple[float, ...]]
"""Returns the advantage of each span. Arguments: the advantage of the branch, the rewards of the spans' turns, the
baseline and the scale of turns (0 where there were no others to compare with), and the settings. It must be linear in
the first two, so that a revision can add the missing part."""
Grade = Callable[[Sequence[Reply], "AdvantageSettings"], Sequence[float | None]]
"""Grades the replies of one branch, in their order: the value of each, which `compute` compares like a reward, or None
where the answer is not trained. Pure, and called more than once for a branch."""
_REMEDY = (
    "declare Signals(rewards=True), or a `grade` for replies; pass `reward_as_advantage` where advantages are fixed or "
    "computed by a teacher"
)


@dataclass(frozen=True, slots=True)
class Estimator:
    """Advantage estimator: a function that computes advantages, with what it needs and which signals it trains.

    `settings` is the class of its settings section `[trainer.advantage.<name>]`, or None without settings.
    """

    compute: Compute
    needs: Needs = NOTHING
    settings: type[Section] | None = None
    signals: Signals = REWARDS
    worth: Worth | None = None
    credit: Credit | None = None
    """Set where turns have advantages of their own."""
    grade: Grade | None = None
    """Set where answers are trained by the user's replies to them."""

    def find_mistake(self, signals: Signals, *, hindsight: bool) -> str | None:
        """Return the problem of an inconsistent declaration with its remedy, or None.

        A declaration is inconsistent if training would never call one of its functions, or if replies are trained and
        it has no function that grades them.

        Args:
            signals: signals that are trained, with those of the setting `demonstrations`.
            hindsight: whether the base computes the advantages of answers with replies, in place of `compute`.
        """
        if hindsight and signals != REPLIES:
            return "Needs(hindsight=True) trains replies alone; declare Signals(rewards=False, replies=True) with it"
        graded = signals.replies and not hindsight
        if graded and self.grade is None:
            return "no function grades the replies of Signals(replies=True); declare `grade` or Needs(hindsight=True)"
        rewards, written = signals.rewards and not signals.branches, signals.written and self.worth is not None
        functions = (
            ("grade", self.grade, graded, "declare Signals(replies=True), and not Needs(hindsight=True)"),
            ("worth", self.worth, rewards or written, "declare Signals(rewards=True)"),
            ("credit", self.credit, rewards, "declare Signals(rewards=True)"),
            ("compute", self.compute, rewards or written or graded, _REMEDY),
        )
        for name, function, called, remedy in functions:
            if function not in (None, reward_as_advantage) and not called:
                return f"its `{name}` would never be called with these signals and needs; {remedy}"
        return None


ESTIMATORS: Registry[Estimator] = Registry("advantages", Estimator, "kind of advantage")


def estimator(
    needs: Needs = NOTHING,
    settings: type[Section] | None = None,
    *,
    signals: Signals = REWARDS,
    worth: Worth | None = None,
    credit: Credit | None = None,
    grade: Grade | None = None,
) -> Callable[[Compute], Estimator]:
    """Return a decorator that declares a function to be an advantage estimator, for registration in `ESTIMATORS`.

    Args:
        needs: what the estimator requires of the learner and of batches, for example groups of runs.
        settings: class of its own section `[trainer.advantage.<name>]`, None without settings.
        signals: parts of an experience that are trained, such as its reward or replies of the user.
        worth: maps a reward to the value that is compared; by default the reward itself.
        credit: distributes a branch's advantage over its turns; by default all tokens get the same advantage.
        grade: gives each of the user's replies a value, which is compared like a reward.
    """
    return lambda compute: Estimator(compute, needs, settings, signals, worth, credit, grade)


def reward_as_advantage(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, _settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Return each branch's reward, as `Estimator.worth` maps it, as its advantage, without a baseline."""
    count = len(batch.rewards_B)
    return Advantages.of(batch.rewards_B, [0.0] * count, [1.0] * count), past


@estimator()
def reinforce_pp(
    batch: AdvantageInputs, past: Baselines, decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute REINFORCE++ advantages against the rolling mean rewards `past` of each task."""
    return advantages.reinforce_pp(
        batch.rewards_B,
        batch.weights_B,
        batch.runs_B,
        batch.tasks_B,
        past,
        decay,
        history_min=HISTORY_MIN,
        tasks_min=TASKS_MIN,
        scale_min=scale_min(settings),
    )


@estimator(Needs(groups=True))
def grpo(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute GRPO advantages, divided by the group's standard deviation if `settings.scale` is `std`."""
    group_advantages = advantages.grpo(
        batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups(), scale_min=scale_min(settings)
    )
    return group_advantages, past


@estimator(Needs(groups=True))
def rloo(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, _settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute advantages as rewards minus the mean reward of the other runs of the task (leave-one-out, RLOO)."""
    return advantages.rloo(batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups()), past


def scale_min(settings: AdvantageSettings) -> float | None:
    """Return the smallest standard deviation to divide by, or None where advantages are not divided."""
    return settings.scale_min if settings.scale == "std" else None
