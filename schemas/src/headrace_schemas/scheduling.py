"""How a gateway states whose call it forwards, so that a replica shares its time fairly also between several gateways.

They are HTTP headers, which a stock vLLM server ignores. The tenant is told apart by the request's `cache_salt`.
"""

from __future__ import annotations

PURPOSE_HEADER = "x-headrace-purpose"
"""`BACKGROUND` for calls that get what users leave."""
SESSION_HEADER = "x-headrace-session"
"""The session key of a call."""
BACKGROUND = "eval"
