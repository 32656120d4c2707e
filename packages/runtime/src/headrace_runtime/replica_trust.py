"""Check of replicas before they get a caller's prompt and the internal key.

Every client that may write to the bus may write addresses to the topic `replicas`. So a replica signs its id and its
URL with `security.internal_key`, and services call a URL only if the signature is valid or a setting permits the host.
A copied heartbeat is harmless, because its URL is that of the replica that signed it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict

from headrace_runtime.logs import get_logger
from headrace_runtime.settings import SecuritySettings, host_fits, is_loopback
from headrace_schemas import Replica

log = get_logger(__name__)
_URL = re.compile(
    r"https?://(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]{0,256})?"
)
"""A URL that all HTTP clients parse alike, without user, query and escapes."""
_LOGGED_MAX = 1024


def signed(replica: Replica, security: SecuritySettings) -> Replica:
    """Return `replica` with its signature, which is empty without an internal key."""
    key = security.internal_key.get_secret_value()
    return replica.model_copy(update={"signature": _signature(replica, key) if key else ""})


class ReplicaTrust:
    """Check whether the URLs of heartbeats may be called. A refused URL is logged once for each replica."""

    def __init__(self, security: SecuritySettings) -> None:
        self._key = security.internal_key.get_secret_value()
        self._hosts = security.replica_hosts
        self._logged_urls: OrderedDict[str, str] = OrderedDict()

    def accepts(self, replica: Replica) -> bool:
        """Return whether the replica's URL may be called.

        With an internal key its signature must be valid; without one it must be on loopback. Hosts in
        `security.replica_hosts` are accepted in both cases.
        """
        match = _URL.fullmatch(replica.url)
        host = match["host"].strip("[]") if match else ""
        if match and (self._is_genuine(replica) or any(host_fits(host, pattern) for pattern in self._hosts)):
            return True
        if self._logged_urls.get(replica.replica_id) != replica.url:
            self._logged_urls[replica.replica_id] = replica.url
            if len(self._logged_urls) > _LOGGED_MAX:
                self._logged_urls.popitem(last=False)
            log.warning("replica_refused", replica=replica.replica_id[:128], host=host[:128], problem=self._problem)
        return False

    def _is_genuine(self, replica: Replica) -> bool:
        if self._key:
            return hmac.compare_digest(_signature(replica, self._key), replica.signature)
        match = _URL.fullmatch(replica.url)
        return match is not None and is_loopback(match["host"].strip("[]"))

    @property
    def _problem(self) -> str:
        reason = "is not signed with security.internal_key" if self._key else "is not on loopback"
        return f"its heartbeat {reason}, and security.replica_hosts does not name its host; it gets no calls"


def _signature(replica: Replica, key: str) -> str:
    message = b"headrace replica\0" + b"\0".join(text.encode() for text in (replica.replica_id, replica.url))
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()
