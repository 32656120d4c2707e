"""The scorer's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REWARDS = Counter("headrace_scorer_rewards_total", "Rewards that entered the ledger", ["source", "outcome"])
CORRECTIONS = Counter(
    "headrace_scorer_corrections_total", "Edits, and sides of preferences, that entered the ledger", ["kind", "outcome"]
)
EXPERIENCES = Counter("headrace_scorer_experiences_total", "Experience revisions sent", ["state"])
EXPERIENCE_SECONDS = Histogram(
    "headrace_scorer_experience_seconds",
    "From a trajectory's closing to its first experience",
    buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 30, 120, 600),
)
WAITING = Gauge("headrace_scorer_waiting_trajectories", "Trajectories that wait for rewards")
FUNCTION_SECONDS = Histogram(
    "headrace_scorer_function_seconds",
    "One call of a reward function",
    ["function"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60),
)
REFITS = Counter(
    "headrace_scorer_refits_total", "Fits of reward models, by whether the model scores runs", ["source", "state"]
)
JUDGE_DISAGREEMENT = Gauge(
    "headrace_scorer_judge_disagreement", "How far a judge is from people on runs that both scored, 0 to 1", ["source"]
)
JUDGE_DRIFTED = Gauge(
    "headrace_scorer_judge_drifted", "1 once a judge agrees with people less than it did at first", ["source"]
)
WORKER_RESTARTS = Counter(
    "headrace_scorer_worker_restarts_total", "Processes of reward functions started again", ["cause"]
)
