"""Metrics of all services. The metrics of a single service are in its own `metrics.py`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

EVENTS_HANDLED = Counter("headrace_events_handled_total", "Events read from the bus, by outcome", ["topic", "outcome"])
DEAD_LETTERS = Counter("headrace_dead_letters_total", "Records that were refused permanently", ["topic", "reason"])
PAUSED = Gauge(
    "headrace_consumer_paused", "1 while a consumer refuses so many records that it may be broken", ["service"]
)
RECORDS_HELD = Gauge(
    "headrace_records_held", "Records held because too many records of their tenant were refused", ["service"]
)
RETRIES = Counter(
    "headrace_retries_total", "Batches that were retried because a dependency was unavailable", ["service"]
)
STEPS_FAILED = Counter(
    "headrace_steps_failed_total", "Steps that failed although their items were isolated", ["service"]
)
ITEMS_FAILED = Counter(
    "headrace_items_failed_total", "Items of a step that failed three times and were reported", ["step"]
)
BATCH_SECONDS = Histogram(
    "headrace_batch_seconds",
    "Time from reading a batch to its durable effect",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
EVENT_AGE_SECONDS = Histogram(
    "headrace_event_age_seconds",
    "Age of an event when its effect was durable",
    ["topic"],
    buckets=(0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15, 60, 300, 3600),
)
OUTBOX_ROWS = Gauge("headrace_outbox_rows", "Events committed to the database but not yet acknowledged by the bus")
QUEUE_LENGTH = Gauge("headrace_queue_length", "Records read from the bus but not yet handled")
JOBS = Gauge("headrace_jobs", "Jobs waiting in the database", ["kind"])
EVENT_LOOP_BLOCK_SECONDS = Gauge(
    "headrace_event_loop_block_seconds",
    "Longest block of the event loop in the last 15 to 30 s; `busy`: it computed, `late`: it waited",
    ["kind"],
)
