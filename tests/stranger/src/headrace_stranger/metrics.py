"""Metrics of `echo` and `counted`."""

from prometheus_client import Counter

HEARD = Counter("headrace_echo_heard_total", "Turns that were heard")
ROWS = Counter("headrace_counted_rows_total", "Rows that were trained")
