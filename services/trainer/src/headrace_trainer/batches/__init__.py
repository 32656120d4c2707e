"""From experiences that wait to a batch as arrays, the same bytes every time (P9)."""
