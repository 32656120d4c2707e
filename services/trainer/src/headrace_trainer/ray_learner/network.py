"""Which network of this machine has an address."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address; None where it is not found, or is of another kind."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if answer[20:24] == wanted:
                return name
    return None
