"""`sft`: supervised fine-tuning on written experiences of people or data sets, and on edits.

    L = - 1/N sum_n log pi(n)        over the N tokens of demonstrations

Needs demonstrations: experiences with `origin = "written"`, and edits. The loss is the one of a policy gradient with an
advantage of 1 and without ratios, so it is linear: a withdrawn demonstration is trained once more with an advantage of
-1, and a revised edit with -1 for its old tokens and with 1 for its new ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.presets import Algorithm, Needs, Signals

LATE: Mapping[str, JsonValue] = {"max_staleness": 64} | {"health.effective_sample_min": 0.0}
"""Defaults of losses without ratios, which do not depend on the sampling version: late feedback is trained as well."""

demonstrations = estimator(Needs(demonstrations=True), signals=Signals(rewards=False, written=True, edits=True))(
    reward_as_advantage
)
SFT = Algorithm("demonstrations", "likelihood", LATE)
