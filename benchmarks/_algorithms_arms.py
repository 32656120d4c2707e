"""Each algorithm of the registry with the signal that it is for, its controls, and the comparisons.

Learning rates and the size of batches were chosen on seed 100, which is none of the five.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks._algorithms_found import Arm, Stage
from benchmarks._algorithms_spoiled import edits_of_others, sides_by_lot
from headrace_cli.controls import kinds
from headrace_trainer.algorithms.presets import ALGORITHMS, Algorithm

_RATE, _BATCH = "optimizer.learning_rate", "batch_experiences"
STAGES: Mapping[str, Stage] = {
    "reinforce++": Stage("reinforce++", "rewards", {_RATE: 3e-4}),
    "ppo": Stage("ppo", "rewards", {_RATE: 3e-4}),
    "rft": Stage("rft", "rewards", {_RATE: 3e-4, _BATCH: 32}),
    "grpo": Stage("grpo", "groups", {_RATE: 3e-4}),
    "dr_grpo": Stage("dr_grpo", "groups", {_RATE: 3e-4}),
    "rloo": Stage("rloo", "groups", {_RATE: 3e-4}),
    "dapo": Stage("dapo", "groups", {_RATE: 3e-4}),
    "gspo": Stage("gspo", "groups", {_RATE: 3e-4}),
    "cispo": Stage("cispo", "groups", {_RATE: 3e-4}),
    "opmd": Stage("opmd", "groups", {_RATE: 3e-4}),
    "multi_step_grpo": Stage("multi_step_grpo", "turns", {_RATE: 3e-4}),
    "sft": Stage("sft", "edits", {_RATE: 3e-4, _BATCH: 32}),
    "dpo": Stage("dpo", "pairs", {_RATE: 3e-4, _BATCH: 32}),
    "kto": Stage("kto", "labels", {_RATE: 3e-4}),
    "mix": Stage("mix", "edits and rewards", {_RATE: 3e-4}),
    "hindsight": Stage("hindsight", "corrections", {_RATE: 3e-4}),
    "on_policy_distill": Stage("on_policy_distill", "nothing", {_RATE: 3e-4}),
}
"""By the names of the registry; a second name of an algorithm needs no stage of its own."""
CORRECTED, CORRIDOR = "e-mail with corrections", "corridor"
LESSONS: Mapping[str, str] = {"hindsight": CORRECTED}
TEACHERS: Mapping[str, str] = {"on_policy_distill": "reinforce++"}
SFT_RL, RL_ALONE = "sft, then reinforce++", "reinforce++"
PER_TURN, TERMINAL = "corridor, rewards of turns", "corridor, reward of the run alone"


def algorithms(registry: Mapping[str, Algorithm] | None = None) -> list[Arm]:
    """An arm for each algorithm that is announced. Raises `LookupError` for one without a stage."""
    announced = ALGORITHMS.all() if registry is None else registry
    known = [announced[name] for name in STAGES if name in announced]
    lost = sorted(name for name, one in announced.items() if not any(one is other for other in known))
    gone = sorted(set(STAGES) - set(announced))
    if lost or gone:
        raise LookupError(
            f"algorithms without a stage: {', '.join(lost) or 'none'}; stages without an algorithm: "
            f"{', '.join(gone) or 'none'}; say in benchmarks/_algorithms_arms.py which signal each is for"
        )
    return [Arm(name, (one,), LESSONS.get(name, "e-mail"), TEACHERS.get(name, "")) for name, one in STAGES.items()]


def _control(name: str, **changes: object) -> Arm:
    from dataclasses import replace

    stage = replace(STAGES[name], **changes)  # type: ignore[arg-type]
    return Arm(f"{name}, shuffled", (stage,), LESSONS.get(name, "e-mail"), control_of=name)


CONTROLS = (
    _control("reinforce++", change=kinds.SHUFFLED.change),
    _control("grpo", change=kinds.SHUFFLED.change),
    _control("kto", change=kinds.SHUFFLED.change),
    _control("dpo", change=sides_by_lot),
    _control("sft", change=edits_of_others),
    _control("hindsight", signal="corrections of others"),
)
_TURNWISE = {_RATE: 3e-4}
COMPARED = (
    Arm(SFT_RL, (Stage("sft", "edits", STAGES["sft"].settings, share=0.5),
                 Stage("reinforce++", "rewards", STAGES["reinforce++"].settings, share=0.5))),
    Arm(PER_TURN, (Stage("multi_step_grpo", "ends and doors", _TURNWISE),), CORRIDOR),
    Arm(TERMINAL, (Stage("multi_step_grpo", "ends", _TURNWISE),), CORRIDOR),
)  # fmt: skip
"""SFT and RL with half of the steps each, beside RL with all of them: as many steps as that."""


def base(lesson: str) -> Arm:
    """What training begins with, scored and not trained."""
    return Arm(f"base: {lesson}", (Stage("reinforce++", "rewards", share=0.0),), lesson)


def arms() -> list[Arm]:
    """All of them, bases first. Raises `LookupError`."""
    found = [*algorithms(), *CONTROLS, *COMPARED]
    return [*(base(lesson) for lesson in dict.fromkeys(arm.lesson for arm in found)), *found]
