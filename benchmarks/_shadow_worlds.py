"""Pairs of tiny language models with an exactly known truth, and the data of a shadow of them.

A model is a table with the logits of the next token for each task, position and previous token. An answer has four
tokens of a vocabulary of six, so that all 1,296 answers to a task can be enumerated and users' ratings of a version are
an exact sum. The logprobs of tokens, and so the importance weights between versions, are those of real autoregressive
sampling.

The probability that a user likes an answer depends mostly on the task, and also on the tokens. The probability varies
between tasks as agents' pass rates do, some near one and some near zero. A judge grades answers with an error, and
prefers one token as a style, which users ignore. One user in three gives feedback.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
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
    """A version, as the log-probabilities of all answers to all tasks."""

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
    """Data of a shadow for each prompt."""

    task: Integers
    candidate: Floats
    champion: Floats
    judged: Floats
    """Grade of the user's session."""
    feedback: Floats
    """User's feedback, NaN without feedback."""
    log_weight: Floats


def near(chance: np.random.Generator, difference: float) -> VersionPair:
    """Return a pair whose candidate is close to the champion and `wanted` better, within a thousandth."""
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
