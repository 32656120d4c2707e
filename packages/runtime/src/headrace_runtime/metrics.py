"""The metrics that all services share. A service's own are in its `metrics.py`; nobody makes one inline."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

EVENTS_HANDLED = Counter(
    "headrace_events_handled_total", "Events taken from the bus, by what became of them", ["topic", "outcome"]
)
DEAD_LETTERS = Counter("headrace_dead_letters_total", "Records refused for good", ["topic", "reason"])
PAUSED = Gauge("headrace_consumer_paused", "1 while a consumer refuses so much that it may be broken", ["service"])
RECORDS_HELD = Gauge(
    "headrace_records_held", "Records kept back because too many of their tenant were refused", ["service"]
)
RETRIES = Counter("headrace_retries_total", "Batches tried again because something was away", ["service"])
STEPS_FAILED = Counter(
    "headrace_steps_failed_total", "Steps that failed although their items were isolated", ["service"]
)
ITEMS_FAILED = Counter("headrace_items_failed_total", "Items of a step that failed by name after three tries", ["step"])
BATCH_SECONDS = Histogram(
    "headrace_batch_seconds",
    "From taking a batch to its durable effect",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
EVENT_AGE_SECONDS = Histogram(
    "headrace_event_age_seconds",
    "How old an event was when its effect was durable",
    ["topic"],
    buckets=(0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15, 60, 300, 3600),
)
OUTBOX_ROWS = Gauge("headrace_outbox_rows", "Events committed to the database and not yet acknowledged by the bus")
QUEUE_LENGTH = Gauge("headrace_queue_length", "Records taken from the bus and not yet handled")
JOBS = Gauge("headrace_jobs", "Work that waits in the database", ["kind"])
EVENT_LOOP_BLOCK_SECONDS = Gauge(
    "headrace_event_loop_block_seconds",
    "Longest time of the last 15 to 30 s in which the event loop served nobody; `busy` computed, `late` waited",
    ["kind"],
)
