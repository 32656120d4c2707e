"""Tests that the trainer's expected gradient over restricted answers is the gradient of the restricted policy.

All answers of a small random grammar, also with penalties and a bias, or of top-p, top-k and min-p on the model's own
logits, are enumerated in float64. Transformers' forward pass and autograd compute their probabilities and the
objectives, without the trainer.
"""

from __future__ import annotations

import math
import random
import string
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_runtime.grammars import vocabulary
from headrace_schemas import Branch, Experience, Span, TokenGrammar
from headrace_schemas.events.chat import LogitShift
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import ESTIMATORS, AdvantageInputs
from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.restrictions import SetBuilder
from headrace_trainer.settings import OptimizerSettings
from headrace_trainer.torch_learner.model.pack_sets import AnswerShift, PackSets
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train
from tests.support.presence import draw_seed
from tests.unit.trainer.test_forward import open_policy
from tests.unit.trainer.world import VOCABULARY, experience

V = "m@000000000000"
PROMPT = (41, 57, 133, 90)
END = 2
KINDS = ["grammar", "shifted", "top"]
Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class Answer:
    """One possible answer with the tokens that were allowed at each position, and its reward."""

    tokens: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    reward: float


@dataclass(frozen=True)
class Case:
    """A model in float64, and all answers that its restricted policy can give."""

    policy: Policy
    builder: SetBuilder
    temperature: float
    answers: tuple[Answer, ...]
    grammar: TokenGrammar | None
    shift: LogitShift | None = None

    def logprobs(self, answer: Answer, model: Any = None) -> Tensor:
        """Return the logprobs of the tokens in the restricted policy, with autograd."""
        ids = torch.tensor([[*PROMPT, *answer.tokens]])
        logits = (model or self.policy.model)(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        scaled = (logits if self.shift is None else logits + _added(self.shift, answer.tokens)) / self.temperature
        return torch.stack(
            [
                row[token] - row[list(allowed)].logsumexp(0)
                for row, token, allowed in zip(scaled, answer.tokens, answer.sets, strict=True)
            ]
        )

    def row(self, answer: Answer, advantage: float, behaviour: Tensor, **fields: Any) -> Row:
        """Return the row that the trainer builds from `answer`."""
        stored = None if self.grammar else [n for allowed in answer.sets for n in (len(allowed), *allowed)]
        span = Span(
            start=len(PROMPT), logprobs=tuple(behaviour.tolist()), turn_id="t", version=V,
            temperature=self.temperature, grammar=0 if self.grammar else None, stored_sets=stored,
            logit_shift=self.shift,
        )  # fmt: skip
        grammars = (self.grammar,) if self.grammar else ()
        branch = Branch(token_ids=(*PROMPT, *answer.tokens), spans=(span,), grammars=grammars)
        event: Experience = experience(fields.pop("number", 1), V).model_copy(update={"branch": branch})
        row = Row.of(event, advantage, None, sets=self.builder.build(branch))
        return Row(**{**row.__dict__, **fields})

    def gradient(self, rows: Sequence[Row], **loss: Any) -> Gradient:
        """Return the gradient that the trainer computes for `rows`, without a change of the weights."""
        options = OptimizerSettings(learning_rate=1e-5, gradient_norm_max=1e9, beta1=0.0)
        optimizer = Optimizer(self.policy.parameters, options)
        settings = LossSettings(agg_mode="seq-mean-token-sum", **loss)
        train(self.policy, optimizer, Batch(tuple(rows), None, settings.agg_mode), settings, 4096, threading.Event())
        return {name: p.grad.clone() for name, p in self.policy.parameters.items() if p.grad is not None}

    def gradient_of(self, objective: Tensor) -> Gradient:
        """Return the gradient of a scalar by autograd."""
        parameters = self.policy.parameters
        gradients = torch.autograd.grad(objective, list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True))


def expected(terms: Sequence[tuple[float, Gradient]]) -> Gradient:
    return {name: torch.stack([weight * gradient[name] for weight, gradient in terms]).sum(0) for name in terms[0][1]}


def distance(left: Gradient, right: Gradient) -> float:
    """Return the norm of the difference, relative to that of `right`."""
    difference = sum(float((left[name] - right[name]).square().sum()) for name in right)
    return math.sqrt(difference / sum(float(tensor.square().sum()) for tensor in right.values()))


@pytest.fixture
def make_case(base: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    monkeypatch.setattr(Optimizer, "apply", lambda *_: None)

    def make(kind: str, *, depth: int = 2) -> Case:
        draw = random.Random(draw_seed())
        policy = open_policy(base)
        policy.model.double()
        with torch.no_grad():
            generator = torch.Generator().manual_seed(draw.randrange(2**31))
            for parameter in policy.parameters.values():
                parameter.mul_(3).add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        builder, temperature = SetBuilder(base, VOCABULARY), draw.choice([0.5, 1.0, 1.25])
        if kind != "top":
            answers, grammar = _of_grammar(base, draw, depth)
            shift = _shift(answers) if kind == "shifted" else None
            return Case(policy, builder, temperature, answers, grammar, shift)
        return Case(policy, builder, temperature, _of_top(policy, draw, temperature, depth), None)

    return make


def _shift(answers: Sequence[Answer]) -> LogitShift:
    """Return a logit shift with penalties, and with a bias of the tokens with which an answer may begin."""
    bias = {token: -2.0 if index % 2 else 3.0 for index, token in enumerate(answers[0].sets[0])}
    return LogitShift(presence_penalty=-0.75, frequency_penalty=1.25, logit_bias={**bias, END: 0.5})


def _added(shift: LogitShift, tokens: Sequence[int]) -> Tensor:
    """Return the values that are added to the logits at each token of an answer, as OpenAI defines them."""
    added = torch.zeros(len(tokens), VOCABULARY, dtype=torch.float64)
    for position, row in enumerate(added):
        for token, bias in shift.logit_bias.items():
            row[token] += bias
        for token in {*tokens[:position]}:
            row[token] -= shift.frequency_penalty * tokens[:position].count(token) + shift.presence_penalty
    return added


def _of_grammar(base: Path, draw: random.Random, length: int) -> tuple[tuple[Answer, ...], TokenGrammar]:
    """Return all tokenizations of three random words of `length` letters, and their grammar.

    The first word also repeats the first letter of the second word.
    """
    from transformers import AutoTokenizer

    words = ["".join(draw.sample(string.ascii_lowercase, length)) for _ in range(3)]
    words[0] = words[1][0] * length if length > 1 else words[0]
    library = vocabulary.library_vocabulary(AutoTokenizer.from_pretrained(base).backend_tokenizer, VOCABULARY, END)
    grammar = TokenGrammar(
        text="start: " + " | ".join(f'"{word}"' for word in words), library=vocabulary.LIBRARY,
        library_version=vocabulary.library_version(), tokenizer_sha256=library.digest, vocabulary=VOCABULARY,
        end_id=END, stop_ids=(END,),
    )  # fmt: skip
    matcher = vocabulary.match_grammar(library.words, grammar.text)
    initial_guide = vocabulary.GrammarGuide(matcher, library.words.vocab_size, END, frozenset({END}))
    answers: list[Answer] = []

    def extend(tokens: tuple[int, ...], sets: tuple[tuple[int, ...], ...]) -> None:
        if tokens and tokens[-1] == END:
            answers.append(Answer(tokens, sets, _reward(draw, len(answers))))
            return
        guide = initial_guide.fresh()
        assert guide.replay(tokens)
        mask = guide.allowed()
        allowed = tuple(token for token in range(VOCABULARY) if mask[token // 32] >> (token % 32) & 1)
        for token in allowed:
            extend((*tokens, token), (*sets, allowed))

    extend((), ())
    return tuple(answers), grammar


def _reward(draw: random.Random, number: int) -> float:
    return [1.0, 0.0][number] if number < 2 else draw.choice([0.0, 0.25, 1.0])


def _of_top(policy: Policy, draw: random.Random, temperature: float, depth: int) -> tuple[Answer, ...]:
    """Return all answers of `depth` tokens under top-k, alone or with top-p or min-p."""
    top_k, top_p, min_p = draw.choice([(3, 1.0, 0.0), (4, 0.5, 0.0), (4, 1.0, 0.7)])
    answers: list[Answer] = []

    @torch.no_grad()
    def allowed_after(tokens: tuple[int, ...]) -> tuple[int, ...]:
        logits = policy.model(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -1]
        shares, ids = (logits / temperature).softmax(0).sort(descending=True)
        shares = shares[: min(top_k, int((shares >= min_p * shares[0]).sum()))]
        shares /= shares.sum()
        count = 1 + int((shares.cumsum(0) < top_p).sum())
        return tuple(sorted(ids[: min(len(shares), count)].tolist()))

    def extend(tokens: tuple[int, ...], sets: tuple[tuple[int, ...], ...]) -> None:
        if len(tokens) == depth:
            answers.append(Answer(tokens, sets, _reward(draw, len(answers))))
            return
        allowed = allowed_after(tokens)
        for token in allowed:
            extend((*tokens, token), (*sets, allowed))

    extend((), ())
    return tuple(answers)


def probabilities(case: Case) -> tuple[list[Tensor], list[float]]:
    """Return the logprobs of each answer, without autograd, and its probability."""
    with torch.no_grad():
        logprobs = [case.logprobs(answer) for answer in case.answers]
    shares = [float(each.sum().exp()) for each in logprobs]
    assert sum(shares) == pytest.approx(1.0, abs=1e-12), "all answers are enumerated"
    return logprobs, shares


def reinforce(case: Case) -> tuple[Gradient, Gradient]:
    """Return the gradients of REINFORCE with a fixed baseline: the trainer's, and that of the expected reward."""
    logprobs, shares = probabilities(case)
    baseline = 0.375
    terms = [
        (share, case.gradient([case.row(answer, answer.reward - baseline, behaviour)]))
        for answer, behaviour, share in zip(case.answers, logprobs, shares, strict=True)
    ]
    rewards = [case.logprobs(answer).sum().exp() * answer.reward for answer in case.answers]
    return expected(terms), case.gradient_of(-torch.stack(rewards).sum())


def grpo(case: Case) -> tuple[Gradient, Gradient]:
    """Return the gradients of groups of two: the trainer's, and that of the expected advantage.

    The advantage is computed against an answer of the present policy.
    """
    logprobs, shares = probabilities(case)
    terms, worth = [], [0.0] * len(case.answers)
    for (i, first), (j, second) in _pairs(case):
        inputs = AdvantageInputs([first.reward, second.reward], [1.0, 1.0], ["a", "b"], ["t", "t"], [[None], [None]])
        decay, settings = Decay(task=0.9, model=0.9, tasks_max=9), AdvantageSettings(kind="grpo")
        values = ESTIMATORS.get("grpo").compute(inputs, Baselines(), decay, settings)[0].values_B
        advantages = [float(np.float32(value)) for value in values]
        rows = [
            case.row(answer, advantage, logprobs[index], number=number)
            for number, (index, answer, advantage) in enumerate(((i, first, advantages[0]), (j, second, advantages[1])))
        ]
        terms.append((shares[i] * shares[j], case.gradient(rows)))
        worth[i] += shares[j] * advantages[0]
    objective = torch.stack(
        [case.logprobs(answer).sum().exp() * w for answer, w in zip(case.answers, worth, strict=True)]
    )
    return expected(terms), case.gradient_of(-objective.sum())


def ppo(case: Case) -> tuple[Gradient, Gradient]:
    """Return the gradients of one token that earlier weights sampled: the trainer's with importance ratios, and the
    exact one."""
    logprobs, shares = probabilities(case)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(draw_seed("moved"))
        for parameter in case.policy.parameters.values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        ratios = [case.logprobs(answer).sum() - each.sum() for answer, each in zip(case.answers, logprobs, strict=True)]
        assert max(ratios) > 1e-3
    terms = [
        (share, case.gradient([case.row(answer, answer.reward, behaviour)], weight_max=1e6))
        for answer, behaviour, share in zip(case.answers, logprobs, shares, strict=True)
    ]
    rewards = [case.logprobs(answer).sum().exp() * answer.reward for answer in case.answers]
    return expected(terms), case.gradient_of(-torch.stack(rewards).sum())


def dpo(case: Case) -> tuple[Gradient, Gradient]:
    """Return the gradients of pairs of answers: the trainer's, and that of the DPO objective with both policies
    restricted."""
    case.policy.keep_reference(Path(case.builder._folder))
    reference = case.policy._reference.double()
    logprobs, shares = probabilities(case)
    with torch.no_grad():
        base = [case.logprobs(answer, reference).sum() for answer in case.answers]
    terms, losses = [], []
    for (i, chosen), (j, rejected) in _pairs(case):
        if chosen.reward <= rejected.reward:
            continue
        sides = ((i, chosen, 1.0), (j, rejected, -1.0))
        rows = [
            case.row(answer, side, logprobs[index], number=number, together="pair", part=f"{number}")
            for number, (index, answer, side) in enumerate(sides)
        ]
        share = shares[i] * shares[j]
        terms.append((share, case.gradient(rows, kind="dpo")))
        margin = case.logprobs(chosen).sum() - base[i] - case.logprobs(rejected).sum() + base[j]
        losses.append(-share * torch.nn.functional.logsigmoid(0.1 * margin))
    return expected(terms), case.gradient_of(torch.stack(losses).sum())


def _pairs(case: Case) -> list[tuple[tuple[int, Answer], tuple[int, Answer]]]:
    numbered = list(enumerate(case.answers))
    return [(first, second) for first in numbered for second in numbered]


ALGORITHMS = {"reinforce++": reinforce, "grpo": grpo, "ppo": ppo, "dpo": dpo}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_expected_gradient_is_that_of_the_restricted_policy(
    make_case: Callable[..., Case], algorithm: str, kind: str
) -> None:
    case = make_case(kind, depth=1 if algorithm == "ppo" else 2)
    trained, enumerated = ALGORITHMS[algorithm](case)
    assert distance(trained, enumerated) < 1e-6


IGNORED = [(algorithm, kind) for algorithm in ALGORITHMS for kind in KINDS if (algorithm, kind) != ("dpo", "shifted")]
"""A shift hardly changes DPO's gradient: the sums over words cancel where the answers of a pair begin alike."""


@pytest.mark.parametrize(("algorithm", "kind"), IGNORED)
def test_expected_gradient_without_the_sets_is_another_one(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, algorithm: str, kind: str
) -> None:
    if kind == "shifted":
        monkeypatch.setattr(
            AnswerShift, "values", lambda shift, start, stop: np.zeros((stop - start, len(shift.words_W)))
        )
    else:
        monkeypatch.setattr(PackSets, "of", classmethod(lambda *_: None))
    case = make_case(kind, depth=1 if algorithm == "ppo" else 2)
    trained, enumerated = ALGORITHMS[algorithm](case)
    assert distance(trained, enumerated) > 0.1
