"""Arms of `benchmarks.algorithms`: each algorithm with its signal, the control runs, and the comparisons.

Learning rates and batch sizes were chosen on seed 100, which is not one of the five reported seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks._algorithms_results import Arm, Stage
from benchmarks._algorithms_shuffled import shuffle_edits, shuffle_preference_sides
from headrace_operations.controls import kinds
from headrace_trainer.algorithms.presets import ALGORITHMS, Algorithm

_RATE, _BATCH = "optimizer.learning_rate", "batch_experiences"
_SLOW: Mapping[str, object] = {_RATE: 1e-4}
"""Half of the demo's learning rate. With it, a random signal leaves the model roughly unchanged instead of degrading
it."""
_HALF: Mapping[str, object] = {**_SLOW, _BATCH: 32}
"""Settings for signals that only some of the runs have."""
STAGES: Mapping[str, Stage] = {
    "reinforce++": Stage("reinforce++", "rewards", _SLOW),
    "ppo": Stage("ppo", "rewards", _SLOW),
    "rft": Stage("rft", "rewards", _HALF),
    "grpo": Stage("grpo", "groups", _SLOW),
    "dr_grpo": Stage("dr_grpo", "groups", _SLOW),
    "rloo": Stage("rloo", "groups", _SLOW),
    "dapo": Stage("dapo", "groups", _SLOW),
    "gspo": Stage("gspo", "groups", _SLOW),
    "cispo": Stage("cispo", "groups", _SLOW),
    "opmd": Stage("opmd", "groups", _SLOW),
    "multi_step_grpo": Stage("multi_step_grpo", "turns", _SLOW),
    "sft": Stage("sft", "edits", _HALF),
    "dpo": Stage("dpo", "pairs", _HALF),
    "kto": Stage("kto", "labels", _SLOW),
    "mix": Stage("mix", "edits and rewards", _SLOW),
    "hindsight": Stage("hindsight", "corrections", _SLOW),
    "on_policy_distill": Stage("on_policy_distill", "nothing", _SLOW),
}
"""Stages by algorithm name. A second name of an algorithm needs no stage of its own."""
CORRECTED, CORRIDOR, WEAK = "e-mail with corrections", "corridor", "e-mail, weak base"
_LESSON_OF: Mapping[str, str] = {"hindsight": CORRECTED}
_TEACHER_OF: Mapping[str, str] = {"on_policy_distill": "reinforce++"}
SFT_RL, RL_ALONE = "weak base, sft and then reinforce++", "weak base, reinforce++ alone"
RL_TWICE = "weak base, reinforce++ alone, twice the steps"
FOLLOWED = "hindsight, replies of others that the model follows"
PER_TURN, TERMINAL = "corridor, rewards of turns", "corridor, reward of the run alone"


def algorithms(registry: Mapping[str, Algorithm] | None = None) -> list[Arm]:
    """Return an arm for each registered algorithm. Raises `LookupError` for an algorithm without a stage."""
    announced = ALGORITHMS.all() if registry is None else registry
    covered = [announced[name] for name in STAGES if name in announced]
    lost = sorted(name for name, algorithm in announced.items() if not any(algorithm is other for other in covered))
    stale = sorted(set(STAGES) - set(announced))
    if lost or stale:
        raise LookupError(
            f"algorithms without a stage: {', '.join(lost) or 'none'}; stages without an algorithm: "
            f"{', '.join(stale) or 'none'}; update STAGES in benchmarks/_algorithms_arms.py"
        )
    return [_arm(name, stage) for name, stage in STAGES.items()]


def _arm(name: str, stage: Stage) -> Arm:
    return Arm(name, (stage,), _LESSON_OF.get(name, "e-mail"), _TEACHER_OF.get(name, ""))


def _control(name: str, change: kinds.Change = kinds.TRUE.change, signal: str = "") -> Arm:
    """Return a control arm: the same algorithm with another signal, or with its own signal changed by `change`."""
    stage = replace(STAGES[name], change=change, signal=signal or STAGES[name].signal)
    return Arm(f"{name}, shuffled", (stage,), _LESSON_OF.get(name, "e-mail"), control_of=name)


CONTROLS = (
    _control("reinforce++", kinds.SHUFFLED.change),
    _control("grpo", kinds.SHUFFLED.change),
    _control("kto", kinds.SHUFFLED.change),
    _control("dpo", shuffle_preference_sides),
    _control("sft", shuffle_edits),
    _control("hindsight", signal="corrections of others"),
)
_WITHOUT_DECAY: Mapping[str, object] = {**_SLOW, "advantage.step_wise_grpo.turn_decay": 0.0}
"""Settings without reward decay over turns, because a door does not influence whether later doors are right."""
COMPARED = (
    Arm(SFT_RL, (STAGES["sft"], STAGES["reinforce++"]), WEAK),
    Arm(RL_ALONE, (STAGES["reinforce++"],), WEAK),
    Arm(RL_TWICE, (replace(STAGES["reinforce++"], share=2.0),), WEAK, promised=False),
    Arm(PER_TURN, (Stage("multi_step_grpo", "ends and doors", _WITHOUT_DECAY),), CORRIDOR),
    Arm(TERMINAL, (Stage("multi_step_grpo", "ends", _SLOW),), CORRIDOR, promised=False),
    Arm(FOLLOWED, (replace(STAGES["hindsight"], signal="corrections of others, followed"),), CORRECTED, promised=False),
)
"""Arms that are compared with each other.

After SFT, RL takes as many steps as it does alone. `RL_TWICE`, with as many steps in total, is reported without a
required result. In the corridor both arms take equally many steps. `FOLLOWED` is reported as well: its replies belong
to other runs but were shown to the model, which follows them, so they have a gap.
"""


def base(lesson: str) -> Arm:
    """Return the arm that only scores a base model, without training."""
    return Arm(f"base, {lesson}", (Stage("reinforce++", "rewards", share=0.0),), lesson)


def arms() -> list[Arm]:
    """Return all arms, base models first. Raises `LookupError`."""
    trained_arms = [*algorithms(), *CONTROLS, *COMPARED]
    return [*(base(lesson) for lesson in dict.fromkeys(arm.lesson for arm in trained_arms)), *trained_arms]
