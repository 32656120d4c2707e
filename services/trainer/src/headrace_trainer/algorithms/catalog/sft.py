"""`sft`: supervised fine-tuning on what people or data sets wrote, and on what they say an answer should have been.

    L = - 1/N sum_n log pi(n)        over the N tokens of demonstrations

Needs demonstrations: experiences with `origin = "written"`, and edits. The loss is the one of a policy gradient with an
advantage of 1 and without ratios, so it is linear: what is withdrawn is trained once more with an advantage of -1, and
a revised edit so for its old tokens, and with 1 for its new ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from headrace_trainer.algorithms.estimators import as_they_are, estimator
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.algorithms.signals import Signals

LATE: Mapping[str, JsonValue] = {"max_staleness": 64} | {"health.effective_sample_min": 0.0}
"""Who samples with which version says nothing to a loss without ratios: what is said late is trained all the same."""

demonstrations = estimator(Needs(demonstrations=True), signals=Signals(rewards=False, written=True, edits=True))(
    as_they_are
)
SFT = Algorithm("demonstrations", "likelihood", LATE)
