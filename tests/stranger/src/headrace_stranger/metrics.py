"""What `echo` counts."""

from prometheus_client import Counter

HEARD = Counter("headrace_echo_heard_total", "Turns that were heard")
