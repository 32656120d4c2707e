"""Each algorithm of the registry with the signal that it is for, its controls, and the comparisons.

Learning rates and the size of batches were chosen on seed 100, which is none of the five.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks._algorithms_found import Arm, Stage
from benchmarks._algorithms_spoiled import edits_of_others, sides_by_lot
from headrace_cli.controls import kinds
from headrace_trainer.algorithms.presets import ALGORITHMS, Algorithm

_RATE, _BATCH = "optimizer.learning_rate", "batch_experiences"
_SLOW: Mapping[str, object] = {_RATE: 1e-4}
"""Half of the demo's: what is said by lot then leaves a model about where it was, and does not wear it out."""
_HALF: Mapping[str, object] = {**_SLOW, _BATCH: 32}
"""Where not every run says something."""
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
"""By the names of the registry; a second name of an algorithm needs no stage of its own."""
CORRECTED, CORRIDOR, WEAK = "e-mail with corrections", "corridor", "e-mail, weak base"
_LESSON_OF: Mapping[str, str] = {"hindsight": CORRECTED}
_TEACHER_OF: Mapping[str, str] = {"on_policy_distill": "reinforce++"}
SFT_RL, RL_ALONE = "weak base, sft and then reinforce++", "weak base, reinforce++ alone"
RL_TWICE = "weak base, reinforce++ alone, twice the steps"
FOLLOWED = "hindsight, replies of others that the model follows"
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
    return [_arm(name, one) for name, one in STAGES.items()]


def _arm(name: str, stage: Stage) -> Arm:
    return Arm(name, (stage,), _LESSON_OF.get(name, "e-mail"), _TEACHER_OF.get(name, ""))


def _control(name: str, change: kinds.Change = kinds.TRUE.change, signal: str = "") -> Arm:
    """The same algorithm with another signal, or with what `change` makes of its own."""
    stage = replace(STAGES[name], change=change, signal=signal or STAGES[name].signal)
    return Arm(f"{name}, shuffled", (stage,), _LESSON_OF.get(name, "e-mail"), control_of=name)


CONTROLS = (
    _control("reinforce++", kinds.SHUFFLED.change),
    _control("grpo", kinds.SHUFFLED.change),
    _control("kto", kinds.SHUFFLED.change),
    _control("dpo", sides_by_lot),
    _control("sft", edits_of_others),
    _control("hindsight", signal="corrections of others"),
)
_ITS_OWN: Mapping[str, object] = {**_SLOW, "advantage.step_wise_grpo.turn_decay": 0.0}
"""A door has no part in whether later ones are right."""
COMPARED = (
    Arm(SFT_RL, (STAGES["sft"], STAGES["reinforce++"]), WEAK),
    Arm(RL_ALONE, (STAGES["reinforce++"],), WEAK),
    Arm(RL_TWICE, (replace(STAGES["reinforce++"], share=2.0),), WEAK, promised=False),
    Arm(PER_TURN, (Stage("multi_step_grpo", "ends and doors", _ITS_OWN),), CORRIDOR),
    Arm(TERMINAL, (Stage("multi_step_grpo", "ends", _SLOW),), CORRIDOR, promised=False),
    Arm(FOLLOWED, (replace(STAGES["hindsight"], signal="corrections of others, followed"),), CORRECTED, promised=False),
)
"""RL has as many steps after SFT as alone; with as many in all (`RL_TWICE`) it is shown beside, without a promise. In
the corridor both have as many. Replies of others that the model was given, and follows, have a gap: they are shown,
too."""


def base(lesson: str) -> Arm:
    """What training begins with, scored and not trained."""
    return Arm(f"base, {lesson}", (Stage("reinforce++", "rewards", share=0.0),), lesson)


def arms() -> list[Arm]:
    """All of them, bases first. Raises `LookupError`."""
    found = [*algorithms(), *CONTROLS, *COMPARED]
    return [*(base(lesson) for lesson in dict.fromkeys(arm.lesson for arm in found)), *found]
