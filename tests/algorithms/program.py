"""Losses, advantages and gradients compared with independent results, promises of the stream, planted faults.

Faults that flip, mix up or forget something: a check that holds without one has to fail with it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import structlog
import torch
import transformers

from headrace_trainer.algorithms.presets import ALGORITHMS
from headrace_trainer.batches import batch, prepare
from headrace_trainer.experiences import examples, waiting
from headrace_trainer.lineage import culprits
from headrace_trainer.torch_learner import token_advantages
from headrace_trainer.torch_learner.model import forward
from tests.algorithms import losses, strays, stream, weights
from tests.algorithms.losses import CASES
from tests.support import tiny_model
from tests.system.program import Line, Program, Run, between, caught

BOUND = 1e-5
Check = Callable[[Path], float]
"""How far something is off, or how often it does not hold."""


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    check: Check


def is_caught(fault: Fault, base: Path) -> bool:
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
    return mock.patch.object(batch.Batch, "weight_factor", return_value=1.0)


def _swapped() -> contextlib.AbstractContextManager[Any]:
    sound = examples._preference_examples

    def compared(*arguments: Any) -> Iterator[examples.Example]:
        return (replace(example, value=-(example.value or 0.0)) for example in sound(*arguments))

    return mock.patch.object(examples, "_preference_examples", compared)


def _unmasked() -> contextlib.AbstractContextManager[Any]:
    sound = prepare._answer_row

    def answer(row: Any, *rest: Any) -> Any:
        answer_row = sound(row, *rest)
        return replace(answer_row, loss_mask_T=np.arange(answer_row.length) > 0)

    return mock.patch.object(prepare, "_answer_row", answer)


def _nameless() -> contextlib.AbstractContextManager[Any]:
    sound = examples._preference_examples

    def compared(*arguments: Any) -> Iterator[examples.Example]:
        return (replace(example, pair=example.pair.rpartition("/")[2]) for example in sound(*arguments))

    return mock.patch.object(examples, "_preference_examples", compared)


def _slopeless() -> contextlib.AbstractContextManager[Any]:
    sound = culprits.apply_result

    def apply_result(prepared: Any, result: Any) -> Any:
        return sound(prepared, replace(result, slopes={}))

    return mock.patch.object(weights, "apply_result", apply_result)


def _forgets_edits() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(examples, "_withdrawn_example", return_value=examples.BRANCH)


def _alone() -> contextlib.AbstractContextManager[Any]:
    sound = batch.pack
    return mock.patch(
        "headrace_trainer.torch_learner.step.split_into_passes",
        lambda several, budget: sound([row.length for row in several], budget),
    )


def _first_of_all() -> contextlib.AbstractContextManager[Any]:
    def match_answers(answers: Any) -> dict[tuple[str, str], str]:
        return {(name, answer.part): "one" for name, answer in answers}

    return _both(
        mock.patch.object(waiting, "match_answers", match_answers),
        mock.patch.object(prepare, "match_answers", match_answers),
    )


def _undiscounted() -> contextlib.AbstractContextManager[Any]:
    sound = token_advantages.gae
    return mock.patch.object(
        token_advantages, "gae", lambda values, reward, gamma, _lam: sound(values, reward, gamma, 1.0)
    )


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
    Fault("GAE without its lambda", _undiscounted, lambda _base: losses.critic_difference(0, 0.99, 0.9)),
)


SEEDS = 20
LOST = strays.LOSS_MAX
DIVERGENCES = ("k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")


def line(name: str, value: float, low: float = 0.0, high: float = BOUND) -> Line:
    """Return a line for an error or a count that must lie between `low` and `high`."""
    return between(name, float(value), low, high)


def of_losses(seeds: int) -> Iterator[Line]:
    for case in losses.CASES:
        yield line(f"loss {case}", max(losses.off_value(case, seed) for seed in range(seeds)))
        yield line(f"gradient {case}", max(losses.off_gradient(case, seed) for seed in range(seeds)))
    for mode in losses.AGG_MODES:
        yield line(f"agg_mode {mode}", max(losses.off_agg_mode(mode, seed) for seed in range(seeds)))
    for kind in DIVERGENCES:
        yield line(f"divergence {kind}", max(losses.off_divergence(kind, seed) for seed in range(seeds)))


def of_advantages(seeds: int) -> Iterator[Line]:
    for name, kind, settings in (
        ("grpo", "grpo", {}),
        ("dr_grpo", "grpo", {"scale": "none"}),
        ("rloo", "rloo", {}),
        ("opmd, mean", "opmd", {}),
        ("opmd, logavgexp", "opmd", {"opmd": {"baseline": "logavgexp", "tau": 0.5}}),
    ):
        yield line(f"advantage {name}", max(losses.group_difference(kind, seed, **settings) for seed in range(seeds)))
    for norm, weight, decay in ((False, 1.0, 1.0), (True, 0.5, 0.9)):
        errors = [losses.turn_difference(seed, norm=norm, weight=weight, decay=decay) for seed in range(seeds)]
        yield line(f"advantage step_wise_grpo, norm {norm}, weight {weight}, decay {decay}", max(errors))
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
        yield line(
            f"advantage ppo {gamma} {lam}", max(losses.critic_difference(seed, gamma, lam) for seed in range(seeds))
        )
        revised = [losses.revision_difference(seed, gamma, lam) for seed in range(seeds)]
        yield line(f"revised reward ppo {gamma} {lam}", max(revised))


def of_streams(base: Path, seeds: int) -> Iterator[Line]:
    for name, broken in stream.every(range(seeds), base):
        yield line(name, float(broken), high=0.0)


def of_weights(base: Path) -> Iterator[Line]:
    for algorithm in weights.KINDS:
        yield line(f"{algorithm}: nats that what is liked gains", weights.gain_of_training(base, algorithm), 0.05, 1e9)
        yield line(
            f"{algorithm}: left by a withdrawal, as a share", weights.left_by_a_withdrawal(base, algorithm), high=1e-4
        )
        yield line(f"{algorithm}: gradient that depends on passes", weights.left_by_passes(base, algorithm), high=1e-6)
    yield line("dpo: slope at the base", weights.slope_beside_the_gradient(base))


def of_strays(seeds: int) -> Iterator[Line]:
    """One reward in another unit, and honest rewards that are not to be mistaken for it."""
    for label, lost in strays.every(range(min(seeds, 6))):
        yield line(f"one stray reward, {label}: speed lost over {strays.RUNS} runs", lost, -LOST, LOST)
        wrong = max(strays.pushed_down(label, 100.0, seed) for seed in range(min(seeds, 6)))
        yield line(f"one stray reward, {label}: right answers of its batch pushed down for it", wrong, high=0.0)
    yield line("stray rewards that the trainer does not name", float(strays.unnamed(0)), high=0.0)
    for before, after in ((1.0, 100.0), (100.0, 1.0), (10.0, 1.0), (1.0, 10.0)):
        runs = max(strays.runs_to_adapt(seed, before, after) for seed in range(min(seeds, 4)))
        yield line(f"runs to adapt from 0/{before:g} to 0/{after:g}", float(runs), high=strays.ADAPTED_MAX)
    for kind in strays.HEAVY:
        yield line(f"honest rewards winsorised, {kind}", strays.flattened(kind, 0), high=strays.FLATTENED_MAX)
    plain = strays.speed_lost("reinforce++", 1e4, 0, 0.5, **strays.PLAIN)
    yield line("caught when planted: the plain deviation", plain, 0.5, 1.0)
    pushed = strays.pushed_down("grpo", 100.0, strays.SEED_OF_GROUPS, **strays.PLAIN)
    yield line("caught when planted: plain rewards in a group", pushed, 1.0, 1e9)
    zealous = strays.flattened("Pareto, index 2", 0, stray_factor=0.5)
    yield line("caught when planted: bounds that are too narrow", zealous, 0.02, 1.0)


def of_faults(base: Path) -> Iterator[Line]:
    for fault in FAULTS:
        yield caught(fault.name, by_the_suite=is_caught(fault, base))


def play(run: Run) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    seeds = run.options.seeds
    base = tiny_model.build(run.folder / "base", layers=1)
    run.add_all(of_losses(seeds))
    run.add_all(of_advantages(seeds))
    run.add_all(of_streams(base, seeds))
    run.add_all(of_weights(base))
    run.add_all(of_strays(seeds))
    run.add_all(of_faults(base))
    run.figures["algorithms"] = list(ALGORITHMS.names())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds per comparison (default: %(default)s)")


PROGRAM = Program("Compare losses and advantages with independent results.", play, _add_arguments)
