"""`ppo`: proximal policy optimization with a critic (arXiv:1707.06347), and its advantages (GAE, arXiv:1506.02438).

    d_t = r_t + gamma V_(t+1) - V_t,      A_t = d_t + gamma lam A_(t+1)        over the sampled tokens of a branch
    L   = - 1/N sum_n min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A),  and where A < 0 no more than 3 |A|
    L_V = 1/N sum_n (V_t - (A_t + V_t before the step))^2 / 2

r_t is the run's reward at the last sampled token, and 0 before it. Needs a critic and logprobs; single runs are enough.
V is a linear map of the policy's last hidden states, with an optimizer of its own; no gradient of it reaches the
policy. `[trainer.critic]` has gamma, lam and its learning rate.

Advantages are not whitened over the batch as in Trinity-RFT: that would confuse the difficulty of tasks with quality,
and turn the rounding errors of a good critic into full advantages. The reward enters A_t as (gamma lam)^(T - t) r, so a
revision is trained with that times the missing reward, exactly, whatever V was. For a withdrawal the learner reports
the critic's expectation of each row: it is reversed in the sum over the row's tokens, and evenly among them. The critic
keeps its own training.
"""

from __future__ import annotations

from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.presets import Algorithm, Needs

rewards = estimator(Needs(critic=True))(reward_as_advantage)
"""The reward itself, from which the learner computes the advantage of each token."""
PPO = Algorithm("ppo", "clipped", {"loss.clip_low": 0.2, "loss.clip_high": 0.2, "loss.clip_dual": 3.0})
