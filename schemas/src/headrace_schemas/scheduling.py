"""HTTP headers by which a gateway describes a call, so that replicas can schedule the calls of all gateways fairly.

A stock vLLM server ignores these headers. The tenant of a call is identified by the request's `cache_salt`.
"""

from __future__ import annotations

PURPOSE_HEADER = "x-headrace-purpose"
"""Header with the value `BACKGROUND` for calls that only get the capacity which users leave unused."""
SESSION_HEADER = "x-headrace-session"
"""Header with the session key of a call."""
BACKGROUND = "eval"
