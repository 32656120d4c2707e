"""Pairs of tiny language models whose truth is known exactly, and what a shadow sees of them.

A model is a table: for each kind of task, position and token before, the logits of the next token. An answer has four
tokens of six, so all 1,296 answers to a task can be listed, and what users think of a version is a sum, not a sample.
The tokens' logprobs, and so the weights of one version's answers for another, are those of real autoregressive
sampling.

A user likes an answer with a probability that depends on the task, mostly, and on the tokens: between tasks it varies
as the pass rates of agents do between theirs, some of which they nearly always do and some nearly never. A judge
grades it with an error, and likes one token for its style, which users do not care about. One user in three says
something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
TASKS, TOKENS, LENGTH = 40, 6, 4
_ANSWERS = np.indices((TOKENS,) * LENGTH).reshape(LENGTH, -1).T
"""Every answer: its tokens."""
_BEFORE = np.concatenate([np.full((len(_ANSWERS), 1), TOKENS), _ANSWERS[:, :-1]], axis=1)
"""The token before each, `TOKENS` at the beginning."""
_STYLE = (_ANSWERS == 0).mean(axis=1)
_DIFFICULTY, _TASTE = 3.0, 0.9
"""Spread of the tasks' logits, and of a token's effect on them."""
_JUDGE_STYLE, _JUDGE_NOISE = 0.3, 0.15
SPOKE = 1 / 3


@dataclass(frozen=True)
class Policy:
    """A version: log-probabilities of every answer to every task."""

    logits: Floats
    """Task, position, token before, token."""

    @property
    def token_logprobs(self) -> Floats:
        """Task, answer, position."""
        most = self.logits.max(axis=-1, keepdims=True)
        table = self.logits - most - np.log(np.exp(self.logits - most).sum(axis=-1, keepdims=True))
        found: Floats = table[:, np.arange(LENGTH), _BEFORE, _ANSWERS]
        return found

    @property
    def answers(self) -> Floats:
        """The probability of each answer: task, answer."""
        found: Floats = np.exp(self.token_logprobs.sum(axis=-1))
        return found


@dataclass(frozen=True)
class ToolUse:
    """By task, whichever version: how probably a session calls tools, and how probably one that does has errors."""

    called: Floats
    wrong: Floats

    @classmethod
    def drawn(cls, chance: np.random.Generator) -> ToolUse:
        """In the mean three sessions in five call tools, and eight in a hundred of those see errors, as in
        `_rollout_worlds`; the errors are those of one task in eight."""
        flaky = chance.permutation(TASKS) < TASKS // 8
        return cls(chance.permutation(np.linspace(0.2, 1.0, TASKS)), np.where(flaky, 0.5, 0.02))


@dataclass(frozen=True)
class VersionPair:
    """A champion and a candidate in front of the same users."""

    champion: Policy
    candidate: Policy
    liked: Floats
    """Task, answer: the probability that the user likes it."""
    tools: ToolUse

    def by_task(self, policy: Policy) -> Floats:
        """How often users like its answers: exact."""
        found: Floats = (policy.answers * self.liked).sum(axis=1)
        return found

    @property
    def truth(self) -> float:
        """Candidate less champion, over tasks as they come, all equally often."""
        return float(np.mean(self.by_task(self.candidate) - self.by_task(self.champion)))


@dataclass(frozen=True)
class Sampled:
    """What a shadow has of each prompt."""

    task: Integers
    candidate: Floats
    champion: Floats
    judged: Floats
    """Of the user's session."""
    said: Floats
    """NaN where the user said nothing."""
    log_weight: Floats


def near(chance: np.random.Generator, wanted: float) -> VersionPair:
    """A candidate that was trained a little further from the champion: `wanted` better, by less than a thousandth
    off."""
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
        low, high = (middle, high) if moved(middle).truth < wanted else (low, middle)
    return moved(high)


def far(chance: np.random.Generator) -> VersionPair:
    """A candidate that has nothing to do with the champion: another model, sure of other answers."""
    tastes = _TASTE * chance.standard_normal((TASKS, LENGTH, TOKENS))
    shape = (TASKS, LENGTH, TOKENS + 1, TOKENS)
    champion, candidate = (Policy(2.0 * chance.standard_normal(shape)) for _ in range(2))
    return VersionPair(champion, candidate, _liked(chance, tastes), ToolUse.drawn(chance))


def _liked(chance: np.random.Generator, tastes: Floats) -> Floats:
    effect = tastes[:, np.arange(LENGTH), _ANSWERS].sum(axis=-1)
    hard = 0.8 + _DIFFICULTY * chance.standard_normal((TASKS, 1))
    found: Floats = 1 / (1 + np.exp(-(hard + effect)))
    return found


def sample(chance: np.random.Generator, pair: VersionPair, prompts: int) -> Sampled:
    """Prompts as they come, each with the champion's logged answer and a new one of each version."""
    task = chance.integers(TASKS, size=prompts)
    logged, champion, candidate = (
        _drawn(chance, policy.answers, task) for policy in (pair.champion, pair.champion, pair.candidate)
    )
    said = (chance.random(prompts) < pair.liked[task, logged]).astype(np.float64)
    said[chance.random(prompts) >= SPOKE] = np.nan
    logprobs = [policy.token_logprobs[task, logged].sum(axis=1) for policy in (pair.candidate, pair.champion)]
    return Sampled(
        task,
        _judged(chance, pair, task, candidate),
        _judged(chance, pair, task, champion),
        _judged(chance, pair, task, logged),
        said,
        logprobs[0] - logprobs[1],
    )


def _drawn(chance: np.random.Generator, answers: Floats, task: Integers) -> Integers:
    upto = np.cumsum(answers, axis=1)
    place = chance.random(len(task))[:, None] * upto[task, -1:]
    found: Integers = (upto[task] < place).sum(axis=1)
    return found


def _judged(chance: np.random.Generator, pair: VersionPair, task: Integers, answer: Integers) -> Floats:
    """Half as steep as the truth, with a style that it likes, and noise."""
    grade = 0.25 + 0.5 * pair.liked[task, answer] + _JUDGE_STYLE * (_STYLE[answer] - 1 / TOKENS)
    found: Floats = np.clip(grade + _JUDGE_NOISE * chance.standard_normal(len(task)), 0.0, 1.0)
    return found
