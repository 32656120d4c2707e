"""Hypothesis strategies for wire messages, read off their annotations."""

from __future__ import annotations

import sys
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from headrace_broker import wire
from headrace_broker.dispatch import APIS

TEXT = st.text(max_size=12)
BYTES = st.binary(max_size=12)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    wire.Bool: st.booleans(),
    wire.Int8: st.integers(-(1 << 7), (1 << 7) - 1),
    wire.Int16: st.integers(-(1 << 15), (1 << 15) - 1),
    wire.Int32: st.integers(-(1 << 31), (1 << 31) - 1),
    wire.Int64: st.integers(-(1 << 63), (1 << 63) - 1),
    wire.String: TEXT,
    wire.NullableString: st.none() | TEXT,
    wire.Bytes: BYTES,
    wire.Records: st.none() | BYTES,
}


def response_of(request: type[Any]) -> type[Any]:
    """The response class that belongs to a request class."""
    response: type[Any] = getattr(sys.modules[request.__module__], request.__name__.replace("Request", "Response"))
    return response


REQUESTS = tuple(api.request for api in APIS)
RESPONSES = tuple(response_of(request) for request in REQUESTS)


_strategies: dict[Any, st.SearchStrategy[Any]] = {}


def messages(message: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a message class; made once for each."""
    if message not in _strategies:
        hints = get_type_hints(message, include_extras=True)  # every field is there, as in the newest version
        _strategies[message] = st.builds(message, *[_field(hints[name]) for name in message._fields])
    return _strategies[message]


def _field(annotation: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bare = [mark for mark in arguments[1:] if not isinstance(mark, wire.Since)]
        return _VALUES[Annotated[arguments[0], *bare]] if bare else _field(arguments[0])
    if origin is tuple:
        return st.lists(_field(arguments[0]), max_size=3).map(tuple)
    if origin in (Union, UnionType):
        return st.none() | _field(arguments[0])
    return messages(annotation)
