"""The number of calls that the process can hold: each has a connection to its client and one to a replica."""

from __future__ import annotations

import resource

from headrace_gateway.settings import LimitSettings
from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)
_OWN = 128
"""For the bus, the spool, the logs and the probes."""
_PER_CALL = 2


def within_descriptors(limits: LimitSettings) -> LimitSettings:
    """Return `limits` with no more concurrency than file descriptors allow, after requesting more descriptors from
    the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OWN + _PER_CALL * limits.concurrency
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    fits = max(1, (soft - _OWN) // _PER_CALL)
    remedy = f"raise the limit (ulimit -n, LimitNOFILE=) to {needed}, or lower gateway.limits_total.concurrency"
    log.warning("few_file_descriptors", limit=soft, concurrency=fits, remedy=remedy)
    return limits.model_copy(update={"concurrency": fits})
