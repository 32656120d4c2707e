"""How many calls the process can hold: each has a connection to its client and one to a replica."""

from __future__ import annotations

import resource

from headrace_gateway.settings import LimitSettings
from headrace_runtime.logs import get_logger

log = get_logger(__name__)
_OWN = 128
"""For the bus, the spool, the logs and the probes."""
_PER_CALL = 2


def within_descriptors(limits: LimitSettings) -> LimitSettings:
    """`limits` with no more concurrency than file descriptors allow; asks the system for more of them first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OWN + _PER_CALL * limits.concurrency
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    fits = max(1, (soft - _OWN) // _PER_CALL)
    remedy = f"raise the limit (ulimit -n, LimitNOFILE=) to {wanted}, or lower gateway.limits_total.concurrency"
    log.warning("few_file_descriptors", limit=soft, concurrency=fits, remedy=remedy)
    return limits.model_copy(update={"concurrency": fits})
