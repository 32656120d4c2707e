"""Prometheus metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

REQUESTS = Counter("headrace_gateway_requests_total", "Requests answered", ["route", "status"])
CALL_SECONDS = Histogram(
    "headrace_gateway_call_seconds", "Chat calls, from accepted to answered", ["mode"], buckets=_SECONDS
)
FIRST_CHUNK_SECONDS = Histogram(
    "headrace_gateway_first_chunk_seconds", "Streamed chat calls, from accepted to the first chunk", buckets=_SECONDS
)
CAPTURE_SECONDS = Histogram(
    "headrace_gateway_capture_seconds",
    "From the last token to the durable turn, for which the client has to wait",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
IGNORED_FIELDS = Counter(
    "headrace_gateway_ignored_fields_total", "Fields of calls that were accepted without an effect", ["field"]
)
TURNS = Counter("headrace_gateway_turns_total", "Turns captured", ["model", "purpose"])
TOKENS = Counter("headrace_gateway_tokens_total", "Tokens of captured turns", ["kind"])
UNDELIVERED = Counter("headrace_gateway_undelivered_total", "Turns whose client had gone before the response ended")
ABANDONED = Counter(
    "headrace_gateway_abandoned_total", "Calls given up uncaptured: their client had gone and they took too long"
)
IN_PROGRESS = Gauge("headrace_gateway_in_progress", "Requests in progress")
UPSTREAM_FAILURES = Counter(
    "headrace_gateway_upstream_failures_total", "Attempts that failed at a replica", ["trouble"]
)
RESUMES = Counter("headrace_gateway_resumes_total", "Streams that went on at another replica")
HISTORIES = Counter("headrace_gateway_histories_total", "Calls sent with the exact tokens of their conversation")
HOLDS = Counter("headrace_gateway_holds_total", "Waits for a replica that can take a call")
PUBLISHED = Counter("headrace_gateway_published_total", "Events made durable, by where", ["topic", "where"])
SPOOL_EVENTS = Gauge("headrace_gateway_spool_events", "Events in the spool")
SPOOL_BYTES = Gauge("headrace_gateway_spool_bytes", "Size of the events in the spool")
