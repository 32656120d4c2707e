"""The kinds of runs that train a model, each by what its users say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks._gains_found import Arm

BASE, EXPLICIT, SFT, DPO = "base", "explicit feedback", "edits, sft", "edits, dpo"
FEW, POISONED, NATURAL = "few thumbs", "few thumbs, poisoned", "natural signals"
DIRECTED_BASE, TYPED, BINARY = "base that reads replies", "typed corrections", "binary rewards"
BY_TOKEN = "typed corrections, by token"
RIVALS = {BINARY: (32, 8), "binary rewards, batches of 8": (8, 6), "binary rewards, batches of 16": (16, 3)}
"""Binary rewards, by the experiences of a batch and how many batches: any of them may be the soonest."""
EDITS = 200
GUARD = "mail_count"
"""The kind of question that nobody asks while corrections are typed."""
PAPERS = {
    TYPED: "arXiv:2601.20802, abstract: at test time, on hard tasks with a binary reward, as likely to find an answer "
    "as best-of-k and several turns are, with a third of the attempts"
}
"""What a paper says of the like, to stand beside our figure."""
_THUMBS = {
    "functions": ["signals"],
    "weights": {"function:*": 0.0, "judge:*": 0.0, "*": 1.0},
    "learned": {"model": "thumbs", "width_max": 1.0},
}
_SIGNALS = {"functions": ["signals"], "weights": {"*": 1.0}}
_EXPLICIT = {"weights": {"*": 1.0}}
_HINDSIGHT = {"algorithm": "hindsight", "batch_experiences": 32}
_CAREFUL = {**_HINDSIGHT, "optimizer": {"learning_rate": 1e-4}, "health": {"guard_drop_max": 0.01}}
"""With the demo's learning rate answers are best after a few steps, and then fall; a hundredth of a nat is a point."""
_IN_ALL_WORDS = {
    **_CAREFUL,
    "advantage": {"kind": "hindsight", "hindsight": {"compared": "distributions"}},
    "batch_experiences": 8,
    "loss": {"updates_per_step": 3},
}
"""What a teacher says of all words is little noise, so several updates are made of a batch, and one of 8 is enough.
Where its gap is not surely positive yet, it waits for the next one."""


def _edited(name: str, algorithm: str) -> Arm:
    trainer = {"algorithm": algorithm, "batch_experiences": 8}
    return Arm(name, "edits", trainer=trainer, rounds=12, sessions=32, edits_max=EDITS, traced=1)


def _settled(name: str, users: str, scorer: Mapping[str, object], *, before: int = 0, judged: bool = False) -> Arm:
    """Signals of different noise are compared where learning has nearly settled: with full labels most is gained in a
    third of these rounds, and what is a noisy reward of each run takes more runs, and not only a worse end."""
    return Arm(name, users, scorer, rounds=60, before=before, judged=judged, traced=20, times=3)


def _replied(name: str, users: str, scorer: Mapping[str, object], trainer: Mapping[str, Any], *, rounds: int) -> Arm:
    """In rounds of a batch: it is counted how many sessions are needed. Small batches decide it; few seeds are luck."""
    batch = trainer["batch_experiences"]
    return Arm(
        name, users, scorer, trainer, rounds=rounds, sessions=batch, lesson="directed", held_back=GUARD, times=3,
        traced=1, more_seeds=batch < 32,
    )  # fmt: skip


def _gap(base: str, users: str, lesson: str) -> Arm:
    trainer = {**_HINDSIGHT, "batch_experiences": 64}
    return Arm(f"gap, {base}, {users}", users, _SIGNALS, trainer, rounds=1, lesson=lesson, times=0)


HAS_A_GAP = _gap(DIRECTED_BASE, "directions", "directed")
HAS_NONE = (
    _gap(DIRECTED_BASE, "nothing but no", "directed"),
    _gap(BASE, "directions", "demo"),
    _gap(BASE, "nothing but no", "demo"),
)
MISLED = _gap(DIRECTED_BASE, "directions of others", "directed")
"""Not seen by the gap, as docs/algorithms.md says: the model follows replies that are wrong. The guard and the gate are
for that, so it is told and is no line."""
ARMS = {
    one.name: one
    for one in (
        Arm(BASE, "rewards", times=3),
        _settled(EXPLICIT, "rewards", _EXPLICIT),
        _edited(SFT, "sft"),
        _edited(DPO, "dpo"),
        Arm(NATURAL, "corrections", _SIGNALS, rounds=20),
        _settled(FEW, "few thumbs", _THUMBS, before=2720, judged=True),
        _settled(POISONED, "few thumbs, poisoned", _THUMBS, before=2720, judged=True),
        Arm(DIRECTED_BASE, "rewards", lesson="directed", more_seeds=True, times=3),
        _replied(TYPED, "directions", _SIGNALS, _IN_ALL_WORDS, rounds=6),
        _replied(BY_TOKEN, "directions", _SIGNALS, _CAREFUL, rounds=15),
        *(
            _replied(name, "rewards", _EXPLICIT, {"batch_experiences": size}, rounds=rounds)
            for name, (size, rounds) in RIVALS.items()
        ),
        HAS_A_GAP,
        *HAS_NONE,
        MISLED,
    )
}  # fmt: skip
