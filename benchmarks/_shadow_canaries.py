"""Canaries of version pairs of known quality, with and without a shadow before, and the number of sessions they need.

The versions are tiny language models: tables with the logits of the next token for each task, position and previous
token. An answer has four tokens of a vocabulary of six, so that all 1,296 answers to a task can be enumerated and
users' ratings of a version are an exact sum. The logprobs of tokens, and so the importance weights between versions,
are those of real autoregressive sampling.

The probability that a user likes an answer depends mostly on the task, and also on the tokens. The probability varies
between tasks as agents' pass rates do, some near one and some near zero. A judge grades answers with an error, and
prefers one token as a style, which users ignore. One user in three gives feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks._rollout_trials import Crossings, play
from benchmarks._rollout_worlds import DAY_S, LOOKS, Flags, Floats, Sessions, World, sessions_of
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.findings import expectations
from headrace_registry.rollouts.plan import RolloutPlan

Integers = NDArray[np.int64]
TASKS, TOKENS, LENGTH = 40, 6, 4
_ANSWERS = np.indices((TOKENS,) * LENGTH).reshape(LENGTH, -1).T
"""Tokens of every answer."""
_BEFORE = np.concatenate([np.full((len(_ANSWERS), 1), TOKENS), _ANSWERS[:, :-1]], axis=1)
"""Token before each token, `TOKENS` at the beginning."""
_STYLE = (_ANSWERS == 0).mean(axis=1)
_DIFFICULTY, _TASTE = 3.0, 0.9
"""Spread of the tasks' logits, and of a token's effect on them."""
_JUDGE_STYLE, _JUDGE_NOISE = 0.3, 0.15
FEEDBACK_SHARE = 1 / 3


@dataclass(frozen=True)
class Policy:
    """A version: the logits of its tokens, which determine the probabilities of all answers to all tasks."""

    logits: Floats
    """Logits by task, position, previous token and token."""

    @property
    def token_logprobs(self) -> Floats:
        """Logprobs by task, answer and position."""
        most = self.logits.max(axis=-1, keepdims=True)
        table = self.logits - most - np.log(np.exp(self.logits - most).sum(axis=-1, keepdims=True))
        logprobs: Floats = table[:, np.arange(LENGTH), _BEFORE, _ANSWERS]
        return logprobs

    @property
    def answers(self) -> Floats:
        """Probability of each answer, by task and answer."""
        probabilities: Floats = np.exp(self.token_logprobs.sum(axis=-1))
        return probabilities


@dataclass(frozen=True)
class ToolUse:
    """Tool use by task, for all versions: the probability of calling tools, and of errors in a session that calls
    them."""

    called: Floats
    wrong: Floats

    @classmethod
    def drawn(cls, chance: np.random.Generator) -> ToolUse:
        """Draw the tool use of tasks.

        On average three sessions in five call tools, and eight in a hundred of those have errors, as in
        `_rollout_worlds`. The errors belong to one task in eight.
        """
        flaky = chance.permutation(TASKS) < TASKS // 8
        return cls(chance.permutation(np.linspace(0.2, 1.0, TASKS)), np.where(flaky, 0.5, 0.02))


@dataclass(frozen=True)
class VersionPair:
    """A champion and a candidate with the same users."""

    champion: Policy
    candidate: Policy
    liked: Floats
    """Probability that the user likes an answer, by task and answer."""
    tools: ToolUse

    def by_task(self, policy: Policy) -> Floats:
        """Return the exact share of liked answers by task."""
        shares: Floats = (policy.answers * self.liked).sum(axis=1)
        return shares

    @property
    def truth(self) -> float:
        """Exact difference between candidate and champion, over equally frequent tasks."""
        return float(np.mean(self.by_task(self.candidate) - self.by_task(self.champion)))


@dataclass(frozen=True)
class ShadowSample:
    """Data of a shadow, one entry for each prompt."""

    task: Integers
    candidate: Floats
    champion: Floats
    judged: Floats
    """Grade of the user's session."""
    feedback: Floats
    """User's feedback, NaN without feedback."""
    log_weight: Floats


def near(chance: np.random.Generator, difference: float) -> VersionPair:
    """Return a pair whose candidate is close to the champion and better by `difference`, within a thousandth."""
    tastes = _TASTE * chance.standard_normal((TASKS, LENGTH, TOKENS))
    liked = _liked(chance, tastes)
    champion = Policy(0.7 * chance.standard_normal((TASKS, LENGTH, TOKENS + 1, TOKENS)))
    drift = 0.1 * chance.standard_normal(champion.logits.shape)
    drift[..., 0] += chance.uniform(-0.15, 0.15)  # its style changes as well

    tools = ToolUse.drawn(chance)

    def moved(by: float) -> VersionPair:
        return VersionPair(champion, Policy(champion.logits + drift + by * tastes[:, :, None, :]), liked, tools)

    low, high = -4.0, 4.0
    for _ in range(18):
        middle = (low + high) / 2
        low, high = (middle, high) if moved(middle).truth < difference else (low, middle)
    return moved(high)


def far(chance: np.random.Generator) -> VersionPair:
    """Return a pair whose candidate is unrelated to the champion: another model that prefers other answers."""
    tastes = _TASTE * chance.standard_normal((TASKS, LENGTH, TOKENS))
    shape = (TASKS, LENGTH, TOKENS + 1, TOKENS)
    champion, candidate = (Policy(2.0 * chance.standard_normal(shape)) for _ in range(2))
    return VersionPair(champion, candidate, _liked(chance, tastes), ToolUse.drawn(chance))


def _liked(chance: np.random.Generator, tastes: Floats) -> Floats:
    effect = tastes[:, np.arange(LENGTH), _ANSWERS].sum(axis=-1)
    hard = 0.8 + _DIFFICULTY * chance.standard_normal((TASKS, 1))
    probabilities: Floats = 1 / (1 + np.exp(-(hard + effect)))
    return probabilities


def sample(chance: np.random.Generator, pair: VersionPair, prompts: int) -> ShadowSample:
    """Sample prompts, each with the champion's logged answer and a new answer of each version."""
    task = chance.integers(TASKS, size=prompts)
    logged, champion, candidate = (
        _drawn(chance, policy.answers, task) for policy in (pair.champion, pair.champion, pair.candidate)
    )
    feedback = (chance.random(prompts) < pair.liked[task, logged]).astype(np.float64)
    feedback[chance.random(prompts) >= FEEDBACK_SHARE] = np.nan
    logprobs = [policy.token_logprobs[task, logged].sum(axis=1) for policy in (pair.candidate, pair.champion)]
    return ShadowSample(
        task,
        _judged(chance, pair, task, candidate),
        _judged(chance, pair, task, champion),
        _judged(chance, pair, task, logged),
        feedback,
        logprobs[0] - logprobs[1],
    )


def _drawn(chance: np.random.Generator, answers: Floats, task: Integers) -> Integers:
    upto = np.cumsum(answers, axis=1)
    level = chance.random(len(task))[:, None] * upto[task, -1:]
    answers_drawn: Integers = (upto[task] < level).sum(axis=1)
    return answers_drawn


def _judged(chance: np.random.Generator, pair: VersionPair, task: Integers, answer: Integers) -> Floats:
    """Return grades of a judge: half as steep as the truth, with a preferred style and noise."""
    grade = 0.25 + 0.5 * pair.liked[task, answer] + _JUDGE_STYLE * (_STYLE[answer] - 1 / TOKENS)
    grades: Floats = np.clip(grade + _JUDGE_NOISE * chance.standard_normal(len(task)), 0.0, 1.0)
    return grades


_TOOLS = ("wrong", "called")


@dataclass(frozen=True)
class Canaries:
    """Results of canaries, one entry for each run."""

    rolled_back: Flags
    promoted: Flags
    undecided: Flags
    sessions: Floats
    """Number of the candidate's sessions until the end of its rollout, or until the horizon if it did not end."""
    in_shadow: Flags
    """Whether the candidate was rolled back before it answered any user."""


@dataclass(frozen=True)
class ShadowRuns:
    """Results of the shadows of all runs."""

    harmed: Flags
    expected: dict[str, Floats]
    """Expected values by metric, by run and task."""


def shadows(
    chance: np.random.Generator, plan: RolloutPlan, pairs: Sequence[VersionPair], runs: int, on_step: Callable[[], None]
) -> ShadowRuns:
    """Run `runs` shadows of each pair, with `plan.shadow_units` prompts and the registry's own statistics."""
    harmed: list[bool] = []
    expected: dict[str, list[list[float]]] = {name: [] for name in ("reward", "tool_errors")}
    for pair in pairs:
        likely = [pair.by_task(pair.candidate), pair.by_task(pair.champion)]
        for _ in range(runs):
            evidence = Evidence(plan)
            task = chance.integers(TASKS, size=plan.shadow_units)
            sides = (likely[0], likely[1], likely[1])
            candidate, champion, logged = (_answers(chance, pair, task, side[task]) for side in sides)
            seen = []
            for number, task_number in enumerate(task):
                both = [_values(metrics, number) for metrics in (candidate, champion, logged)]
                evidence.add_shadow_pair(both[0], both[1])
                seen += [((f"task:{task_number}",), values) for values in both]
            harmed.append(bool(evidence.findings(numbers=False).harmed))
            table = expectations(seen)
            of_tasks = [table.of((f"task:{task_number}",)) for task_number in range(TASKS)]
            for name, column in expected.items():
                column.append([values[name] for values in of_tasks])
            on_step()
    return ShadowRuns(np.array(harmed), {name: np.array(column) for name, column in expected.items()})


def _answers(chance: np.random.Generator, pair: VersionPair, task: Integers, likely: Floats) -> dict[str, Floats]:
    """Return sessions as `_rollout_worlds` draws them, without users: a function's verdict and a judge's grade."""
    world = replace(World(), missing=0.0, thumbs=0.0, maturity_s=1e9, closing_s=2e9)
    sessions = sessions_of(chance, world, likely < 0, likely)
    _use_tools(chance, sessions, pair.tools.wrong[task], pair.tools.called[task])
    return {name: sessions.values[name, "maturity"] for name in ("reward", "missing", "tool_errors", "loops")}


def _use_tools(chance: np.random.Generator, sessions: Sessions, wrong: Floats, called: Floats) -> None:
    """Draw tool errors. The need for tools and their error rate depend on the task."""
    failed = (chance.random(len(wrong)) < wrong).astype(np.float64)
    failed[chance.random(len(wrong)) >= called] = np.nan
    for look in LOOKS:
        sessions.values["tool_errors", look] = failed


def _values(metrics: dict[str, Floats], number: int) -> dict[str, float]:
    return {name: float(values[number]) for name, values in metrics.items() if not np.isnan(values[number])}


def canaries(
    chance: np.random.Generator,
    plan: RolloutPlan,
    pairs: Sequence[VersionPair],
    runs: int,
    horizon: int,
    shadow: ShadowRuns | None,
    on_session: Callable[[], None],
    *,
    kinds: bool = True,
) -> Canaries:
    """Run `runs` canaries of each pair, over `horizon` sessions of both arms. With `kinds`, prompts identify their
    task."""
    world = World()
    count = len(pairs) * runs
    likely = np.repeat([[pair.by_task(pair.champion), pair.by_task(pair.candidate)] for pair in pairs], runs, axis=0)
    wrong, called = (np.repeat([getattr(pair.tools, name) for pair in pairs], runs, axis=0) for name in _TOOLS)
    row = np.arange(count)

    def source(number: int) -> Sessions:
        task = chance.integers(TASKS, size=count)
        arm = chance.random(count) < 0.5
        hour = np.sin(2 * np.pi * (row * (DAY_S / count) + number * world.every_s) / DAY_S)
        success_probability = np.clip(likely[row, arm.astype(np.int64), task] + world.swing * hour, 0.0, 1.0)
        sessions = sessions_of(chance, world, arm, success_probability)
        _use_tools(chance, sessions, wrong[row, task], called[row, task])
        if shadow is not None and kinds:
            sessions.expected |= {name: values[row, task] for name, values in shadow.expected.items()}
        return sessions

    crossings = play(chance, plan, world, horizon, count, on_session, source)
    harmed = shadow.harmed if shadow is not None else np.zeros(count, bool)
    return _results(crossings, plan, world, harmed, horizon)


def _results(crossings: Crossings, plan: RolloutPlan, world: World, in_shadow: Flags, horizon: int) -> Canaries:
    harmed_s, safe_s, uneven_s = (
        crossings.harmed_at_s(plan, world),
        crossings.safe_at_s(plan, world),
        crossings.uneven_at_s(plan, world),
    )
    first = np.minimum(np.minimum(harmed_s, safe_s), uneven_s)
    used = np.where(in_shadow, 0.0, np.minimum(crossings.exposed(first, world), horizon / 2))
    live = ~in_shadow & np.isfinite(first)
    return Canaries(
        rolled_back=in_shadow | (live & (harmed_s <= first)),
        promoted=live & (safe_s < np.minimum(harmed_s, uneven_s)),
        undecided=~in_shadow & ~(live & ((harmed_s <= first) | (safe_s < np.minimum(harmed_s, uneven_s)))),
        sessions=used,
        in_shadow=in_shadow,
    )
