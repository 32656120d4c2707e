"""Counting of the values in a JSON text before it is parsed.

A parser keeps the interpreter lock until it is done, and its time depends on the number of values rather than on the
bytes: 8 MB of one string take 20 ms, 8 MB of `{}` two seconds, even in a thread. An object or a list costs ten times as
much as a number, in parsing and afterwards, so these are also counted separately.
"""

from __future__ import annotations

import re

_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+(")?'
_REST = re.compile(_STRING, re.DOTALL)
_TOKEN = re.compile(rb'"' + _STRING + rb"|([\[{,])", re.DOTALL)
_PORTION_BYTES = 1_048_576
"""Bytes between two releases of the interpreter lock."""


def more_values_than(body: bytes, values_max: int, containers_max: int | None = None) -> bool:
    """Return whether `body` contains more than `values_max` values or more than `containers_max` objects and lists.

    Values are counted by the characters that separate and open them, so `body` need not be valid JSON.
    """
    opened_max = values_max if containers_max is None else containers_max
    opening = body.count(b"[") + body.count(b"{")
    if opening + body.count(b",") <= values_max and opening <= opened_max:
        return False
    count = opened = at = 0
    inside = False
    while True:
        end = min(at + _PORTION_BYTES, len(body))
        if inside:
            rest = _REST.match(body, at, end)
            assert rest is not None, "the pattern matches the empty string"
            at, inside = rest.end(), rest.group(1) is None
        if not inside:
            for token in _TOKEN.finditer(body, at, end):
                if token.group(2):
                    count += 1
                    opened += token.group(2) != b","
                elif token.group(1) is None:  # a string that goes on in the next portion
                    at, inside = token.end(), True
                if count > values_max or opened > opened_max:
                    return True
            at = at if inside else end
        if end == len(body):
            return False
