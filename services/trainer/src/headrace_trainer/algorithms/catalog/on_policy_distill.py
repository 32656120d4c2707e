"""`on_policy_distill`: a teacher grades each token that the student sampled (arXiv:2306.13649; Trinity-RFT's algorithm
of this name).

    A_n = coefficient (log pi_teacher(n) - log mu(n)),        mu: the engine that sampled it
    L   = - 1/N sum_n min(rho A, clip(rho) A)

Needs a teacher and logprobs, and no reward: every sampled branch is trained. `[trainer.teacher]` names the teacher: a
model's folder with the same vocabulary, which the learner loads, or an endpoint that returns the logprobs of a prompt.
A revision of the reward changes nothing, because the advantage does not depend on it.
"""

from __future__ import annotations

from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.presets import Algorithm, Needs, Signals

taught = estimator(Needs(teacher=True, logprobs=True), signals=Signals(rewards=False, branches=True))(
    reward_as_advantage
)
ON_POLICY_DISTILL = Algorithm("on_policy_distill")
