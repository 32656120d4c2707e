"""Counts the values of a JSON text before it is parsed.

A parser keeps the interpreter's lock until it is done, and its time is in the number of values rather than in bytes:
8 MB of one text take 20 ms, 8 MB of `{}` two seconds, thread or not. An object or a list costs ten times as much as a
number, when it is read and in all that follows, so these are counted by themselves as well.
"""

from __future__ import annotations

import re

_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+(")?'
_REST = re.compile(_STRING, re.DOTALL)
_TOKEN = re.compile(rb'"' + _STRING + rb"|([\[{,])", re.DOTALL)
_PORTION_BYTES = 1_048_576
"""The lock is given away between two portions."""


def more_values_than(body: bytes, most: int, containers_max: int | None = None) -> bool:
    """Return whether `body` holds more than `most` values, counted by what separates and opens them, or more than
    `containers_max` objects and lists. It need not be valid."""
    opened_max = most if containers_max is None else containers_max
    opening = body.count(b"[") + body.count(b"{")
    if opening + body.count(b",") <= most and opening <= opened_max:
        return False
    found = opened = at = 0
    inside = False
    while True:
        end = min(at + _PORTION_BYTES, len(body))
        if inside:
            rest = _REST.match(body, at, end)
            assert rest is not None, "it matches nothing at all, too"
            at, inside = rest.end(), rest.group(1) is None
        if not inside:
            for token in _TOKEN.finditer(body, at, end):
                if token.group(2):
                    found += 1
                    opened += token.group(2) != b","
                elif token.group(1) is None:  # a string that goes on in the next portion
                    at, inside = token.end(), True
                if found > most or opened > opened_max:
                    return True
            at = at if inside else end
        if end == len(body):
            return False
