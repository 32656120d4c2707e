"""Fault injection into a blob store's files; Python runs this module in each process with the folder on its path.

Python raises audit events before a file is opened, renamed, linked or listed, for every library. Below a folder
`blobs`, such an operation takes `delay_s` longer or raises `EIO` with probability `fail`, as the file named in
`CHAOS_BLOBS` specifies.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time

_EVENTS = {"open", "os.rename", "os.link", "os.listdir", "os.scandir", "os.mkdir"}
_CONTROL = os.environ.get("CHAOS_BLOBS", "")
_LOOK_S = 0.2
_orders: dict[str, float] = {}
_looked_s = 0.0


def _trouble(event: str, arguments: tuple[object, ...]) -> None:
    if event not in _EVENTS or not isinstance(arguments[0], str) or "/blobs/" not in f"{arguments[0]}/":
        return
    orders = _read()
    if delay_s := orders.get("delay_s"):
        time.sleep(delay_s)
    if random.random() < orders.get("fail", 0.0):
        raise OSError(errno.EIO, "the chaos took the blob store away", arguments[0])


def _read() -> dict[str, float]:
    global _orders, _looked_s
    now_s = time.monotonic()
    if now_s - _looked_s > _LOOK_S:
        _looked_s = now_s
        try:
            with open(_CONTROL, encoding="utf-8") as file:  # noqa: PTH123 (this runs before anything is imported)
                _orders = json.load(file)
        except (OSError, ValueError):  # it is being written
            pass
    return _orders


if _CONTROL:
    sys.addaudithook(_trouble)
