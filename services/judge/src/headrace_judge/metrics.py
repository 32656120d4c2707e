"""Metrics of the judge. Its queue is `headrace_jobs{kind="verdict"}`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

CALLS = Counter("headrace_judge_calls_total", "Calls to the endpoint, by how they ended", ["result"])
CALL_SECONDS = Histogram(
    "headrace_judge_call_seconds",
    "How long calls to the endpoint took, failed ones included",
    buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 60, 120),
)
TOKENS = Counter("headrace_judge_tokens_total", "Tokens that the endpoint reported", ["kind"])
OUTCOMES = Counter("headrace_judge_outcomes_total", "Rewards published, by outcome", ["source", "outcome"])
CACHE_HITS = Counter("headrace_judge_cache_hits_total", "Questions that were answered from the cache")
ASKED_AGAIN = Counter("headrace_judge_asked_again_total", "Unreadable verdicts that the model was asked to repair")
TIES_BY_ORDER = Counter(
    "headrace_judge_ties_by_order_total",
    "Pairs whose winner depended on the order in which they were shown",
    ["source"],
)
SHORTENED = Counter("headrace_judge_shortened_total", "Runs whose transcript was shortened", ["source"])
RETRIES = Counter("headrace_judge_retries_total", "Trajectories and pairs put back because the endpoint failed")
IN_PROGRESS = Gauge("headrace_judge_in_progress", "Trajectories and pairs that are being judged")
ENDPOINT_UP = Gauge("headrace_judge_endpoint_up", "0 while the endpoint fails and work is held back")
BUDGET_LEFT = Gauge("headrace_judge_budget_left", "What may still be spent, per setting with a limit", ["setting"])
