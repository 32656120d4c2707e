"""`python -m tests.algorithms`: each loss and advantage beside an independent result, gradients by differences, what
the stream promises with edits and preferences in it, and planted faults; status 1 when a line does not hold."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
import transformers

from headrace_trainer.algorithms.presets import ALGORITHMS
from tests.algorithms import advantages, losses, strays, stream, weights
from tests.algorithms.planted import BOUND, FAULTS, caught
from tests.support import tiny_model

SEEDS = 20
LOST = strays.LOSS_MAX
DIVERGENCES = ("k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")


@dataclass(frozen=True)
class Line:
    """One thing that is promised: how far it is off, or how often it does not hold, and what it may be."""

    name: str
    value: float
    low: float = 0.0
    high: float = BOUND

    @property
    def holds(self) -> bool:
        return bool(self.low <= self.value <= self.high)


def of_losses(seeds: int) -> Iterator[Line]:
    for case in losses.CASES:
        yield Line(f"loss {case}", max(losses.off_value(case, seed) for seed in range(seeds)))
        yield Line(f"gradient {case}", max(losses.off_gradient(case, seed) for seed in range(seeds)))
    for mode in losses.AGG_MODES:
        yield Line(f"agg_mode {mode}", max(losses.off_agg_mode(mode, seed) for seed in range(seeds)))
    for kind in DIVERGENCES:
        yield Line(f"divergence {kind}", max(losses.off_divergence(kind, seed) for seed in range(seeds)))


def of_advantages(seeds: int) -> Iterator[Line]:
    for name, kind, settings in (
        ("grpo", "grpo", {}),
        ("dr_grpo", "grpo", {"scale": "none"}),
        ("rloo", "rloo", {}),
        ("opmd, mean", "opmd", {}),
        ("opmd, logavgexp", "opmd", {"opmd": {"baseline": "logavgexp", "tau": 0.5}}),
    ):
        yield Line(f"advantage {name}", max(advantages.of_groups(kind, seed, **settings) for seed in range(seeds)))
    for norm, weight, decay in ((False, 1.0, 1.0), (True, 0.5, 0.9)):
        found = [advantages.of_turns(seed, norm=norm, weight=weight, decay=decay) for seed in range(seeds)]
        yield Line(f"advantage step_wise_grpo, norm {norm}, weight {weight}, decay {decay}", max(found))
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
        yield Line(
            f"advantage ppo {gamma} {lam}", max(advantages.of_a_critic(seed, gamma, lam) for seed in range(seeds))
        )
        revised = [advantages.of_a_revised_reward(seed, gamma, lam) for seed in range(seeds)]
        yield Line(f"revised reward ppo {gamma} {lam}", max(revised))


def of_streams(base: Path, seeds: int) -> Iterator[Line]:
    for name, broken in stream.every(range(seeds), base):
        yield Line(name, float(broken), high=0.0)


def of_weights(base: Path) -> Iterator[Line]:
    for algorithm in weights.KINDS:
        yield Line(f"{algorithm}: nats that what is liked gains", weights.gain_of_training(base, algorithm), 0.05, 1e9)
        yield Line(
            f"{algorithm}: left by a withdrawal, as a share", weights.left_by_a_withdrawal(base, algorithm), high=1e-4
        )
        yield Line(f"{algorithm}: gradient that depends on passes", weights.left_by_passes(base, algorithm), high=1e-6)
    yield Line("dpo: slope at the base", weights.slope_beside_the_gradient(base))


def of_strays(seeds: int) -> Iterator[Line]:
    """One reward in another unit, and honest rewards that are not to be mistaken for it."""
    for label, lost in strays.every(range(min(seeds, 6))):
        yield Line(f"one stray reward, {label}: speed lost over {strays.RUNS} runs", lost, -LOST, LOST)
        wrong = max(strays.pushed_down(label, 100.0, seed) for seed in range(min(seeds, 6)))
        yield Line(f"one stray reward, {label}: right answers of its batch pushed down for it", wrong, high=0.0)
    yield Line("stray rewards that the trainer does not name", float(strays.unnamed(0)), high=0.0)
    for before, after in ((1.0, 100.0), (100.0, 1.0), (10.0, 1.0), (1.0, 10.0)):
        runs = max(strays.runs_to_adapt(seed, before, after) for seed in range(min(seeds, 4)))
        yield Line(f"runs to adapt from 0/{before:g} to 0/{after:g}", float(runs), high=strays.ADAPTED_MAX)
    for kind in strays.HEAVY:
        yield Line(f"honest rewards winsorised, {kind}", strays.flattened(kind, 0), high=strays.FLATTENED_MAX)
    plain = strays.speed_lost("reinforce++", 1e4, 0, 0.5, **strays.PLAIN)
    yield Line("caught when planted: the plain deviation", plain, 0.5, 1.0)
    pushed = strays.pushed_down("grpo", 100.0, strays.SEED_OF_GROUPS, **strays.PLAIN)
    yield Line("caught when planted: plain rewards in a group", pushed, 1.0, 1e9)
    zealous = strays.flattened("Pareto, index 2", 0, stray_factor=0.5)
    yield Line("caught when planted: bounds that are too narrow", zealous, 0.02, 1.0)


def of_faults(base: Path) -> Iterator[Line]:
    for fault in FAULTS:
        yield Line(f"caught when planted: {fault.name}", float(caught(fault, base)), 1.0, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("reports/test-algorithms.json"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    began, lines = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="headrace-algorithms-") as scratch:
        base = tiny_model.build(Path(scratch) / "base", layers=1)
        parts = (of_losses(given.seeds), of_advantages(given.seeds), of_streams(base, given.seeds), of_weights(base),
                 of_strays(given.seeds), of_faults(base))  # fmt: skip
        for part in parts:
            for line in part:
                lines.append(line)
                print(f"{'holds' if line.holds else 'FAILS'}  {line.value:10.2e}  {line.name}", flush=True)
    failed = [line.name for line in lines if not line.holds]
    report = {
        "seconds": round(time.perf_counter() - began, 1),
        "algorithms": list(ALGORITHMS.names()),
        "lines": [vars(line) | {"value": float(line.value), "holds": line.holds} for line in lines],
    }
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{len(lines)} lines in {report['seconds']} s, {len(failed)} do not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
