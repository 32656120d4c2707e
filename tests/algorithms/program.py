"""Losses, advantages and gradients compared with independent results, promises of the stream, planted faults."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import structlog
import torch
import transformers

from headrace_trainer.algorithms.presets import ALGORITHMS
from tests.algorithms import advantages, losses, strays, stream, weights
from tests.algorithms.planted import BOUND, FAULTS
from tests.algorithms.planted import caught as is_caught
from tests.support import tiny_model
from tests.system.line import Line, between, caught
from tests.system.program import Program, Run

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
        yield line(f"advantage {name}", max(advantages.of_groups(kind, seed, **settings) for seed in range(seeds)))
    for norm, weight, decay in ((False, 1.0, 1.0), (True, 0.5, 0.9)):
        errors = [advantages.of_turns(seed, norm=norm, weight=weight, decay=decay) for seed in range(seeds)]
        yield line(f"advantage step_wise_grpo, norm {norm}, weight {weight}, decay {decay}", max(errors))
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
        yield line(
            f"advantage ppo {gamma} {lam}", max(advantages.of_a_critic(seed, gamma, lam) for seed in range(seeds))
        )
        revised = [advantages.of_a_revised_reward(seed, gamma, lam) for seed in range(seeds)]
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
