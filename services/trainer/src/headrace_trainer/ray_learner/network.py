"""Finds the network interface of an address."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address, or None where there is none, or the address is of
    another kind."""
    try:
        packed_address = socket.inet_aton(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no address
                continue
            if answer[20:24] == packed_address:
                return name
    return None
