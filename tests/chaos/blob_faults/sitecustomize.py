"""Module that runs at the start of every process that has this folder on its path.

Python's audit events come before a file is opened, renamed, linked or listed, whichever library does it. Below a folder
`blobs`, they take `delay_s` longer, or raise `EIO` with probability `fail`, as the file `CHAOS_BLOBS` specifies.
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
