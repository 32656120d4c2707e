"""The console's own metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

LOGINS = Counter("headrace_console_logins_total", "Attempts to log in, by outcome", ["outcome"])
"""Outcomes: `accepted`; `refused`: the token is wrong or used; `limited`: too many attempts within a minute."""
TABS = Gauge("headrace_console_tabs", "Browser tabs that follow changes")
