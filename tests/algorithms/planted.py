"""Faults that flip, mix up or forget something: a check that holds without one has to fail with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from headrace_trainer.batches import batch, prepare, rows
from headrace_trainer.experiences import examples, pairing, pending_updates
from headrace_trainer.lineage import step_result
from headrace_trainer.torch_learner import critic
from headrace_trainer.torch_learner.model import forward
from tests.algorithms import advantages, losses, stream, weights
from tests.algorithms.losses import CASES

BOUND = 1e-5
Check = Callable[[Path], float]
"""How far something is off, or how often it does not hold."""


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    check: Check


def caught(fault: Fault, base: Path) -> bool:
    """Whether the check holds without the fault and does not hold with it."""
    if fault.check(base) > BOUND:
        return False
    with fault.plant():
        try:
            return fault.check(base) > BOUND
        except AssertionError:
            return True


def _case(kind: str) -> losses.Case:
    return next(case for case in CASES if case.kind == kind)


def _value(kind: str) -> Check:
    return lambda _base: losses.off_value(_case(kind), 3)


def _flipped() -> contextlib.AbstractContextManager[Any]:
    sound = forward._advantages
    return mock.patch.object(forward, "_advantages", lambda row: -sound(row))


def _crossed() -> contextlib.AbstractContextManager[Any]:
    sound = forward._pairs
    return mock.patch.object(forward, "_pairs", lambda several: np.roll(sound(several), 1))


def _by_tokens() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(batch.Batch, "factor", return_value=1.0)


def _swapped() -> contextlib.AbstractContextManager[Any]:
    sound = examples._preference_examples

    def compared(*arguments: Any) -> Iterator[examples.Example]:
        return (replace(example, value=-(example.value or 0.0)) for example in sound(*arguments))

    return mock.patch.object(examples, "_preference_examples", compared)


def _unmasked() -> contextlib.AbstractContextManager[Any]:
    sound = rows._answer_row

    def answer(row: Any, *rest: Any) -> Any:
        answer_row = sound(row, *rest)
        return replace(answer_row, loss_mask_T=np.arange(answer_row.length) > 0)

    return mock.patch.object(rows, "_answer_row", answer)


def _nameless() -> contextlib.AbstractContextManager[Any]:
    sound = examples._preference_examples

    def compared(*arguments: Any) -> Iterator[examples.Example]:
        return (replace(example, pair=example.pair.rpartition("/")[2]) for example in sound(*arguments))

    return mock.patch.object(examples, "_preference_examples", compared)


def _slopeless() -> contextlib.AbstractContextManager[Any]:
    sound = step_result.apply_result

    def apply_result(prepared: Any, result: Any) -> Any:
        return sound(prepared, replace(result, slopes={}))

    return mock.patch.object(weights, "apply_result", apply_result)


def _forgets_edits() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(pending_updates, "_withdrawn_example", return_value=examples.BRANCH)


def _alone() -> contextlib.AbstractContextManager[Any]:
    sound = batch.pack
    return mock.patch(
        "headrace_trainer.torch_learner.step.passes",
        lambda several, budget: sound([row.length for row in several], budget),
    )


def _first_of_all() -> contextlib.AbstractContextManager[Any]:
    def match_answers(answers: Any) -> dict[tuple[str, str], str]:
        return {(name, answer.part): "one" for name, answer in answers}

    return _both(
        mock.patch.object(pairing, "match_answers", match_answers),
        mock.patch.object(prepare, "match_answers", match_answers),
    )


def _undiscounted() -> contextlib.AbstractContextManager[Any]:
    sound = critic.gae
    return mock.patch.object(critic, "gae", lambda values, reward, gamma, _lam: sound(values, reward, gamma, 1.0))


@contextlib.contextmanager
def _both(*patches: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _passes(base: Path) -> float:
    return max(0.0, weights.left_by_passes(base, "dpo") - 1e-6)


FAULTS = (
    Fault("a flipped sign of the advantage: likelihood", _flipped, _value("likelihood")),
    Fault("a flipped sign of the advantage: clipped", _flipped, _value("clipped")),
    Fault("a flipped sign of the advantage: gspo", _flipped, _value("gspo")),
    Fault("a flipped sign of the advantage: kto", _flipped, _value("kto")),
    Fault("pairs that are not each other's", _crossed, _value("dpo")),
    Fault("a mean over tokens where sequences count: gspo", _by_tokens, _value("gspo")),
    Fault("a mean over tokens where origins count: mix", _by_tokens, _value("mix")),
    Fault("chosen and rejected swapped", _swapped, lambda base: stream.wrong_sides(base, 0)),
    Fault("no mask over the prompt of an answer", _unmasked, lambda base: stream.tokens_made_anew(base, 0)),
    Fault("preferences without their tenant", _nameless, lambda base: stream.tenants_that_met(base, 0)),
    Fault("all answers in one pair", _first_of_all, lambda base: stream.wrong_sides(base, 0)),
    Fault("pairs torn apart by passes", _alone, _passes),
    Fault("a withdrawal without its slope", _slopeless, lambda base: weights.left_by_a_withdrawal(base, "dpo") // 0.01),
    Fault(
        "a withdrawn edit that is forgotten",
        _forgets_edits,
        lambda base: sum(stream.wrong_in_the_end(base, stream.SFT, "demonstrations", seed) for seed in range(4)),
    ),
    Fault("GAE without its lambda", _undiscounted, lambda _base: advantages.of_a_critic(0, 0.99, 0.9)),
)
