"""Splitting server-sent events, whatever the network makes of them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.sse import EventTooLarge, Splitter, encode

PAYLOADS = st.lists(
    st.binary(min_size=1, max_size=40).filter(lambda data: not {10, 13, 0xC2, 0xE2} & set(data)), max_size=8
)


@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_of_the_bytes_gives_the_same_events(payloads: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(encode(payload) for payload in payloads)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    splitter = Splitter(1000)
    found = [event for a, b in itertools.pairwise(edges) for event in splitter.feed(whole[a:b])]
    assert found == payloads


def test_comments_other_fields_and_carriage_returns_are_no_data() -> None:
    splitter = Splitter(1000)
    assert splitter.feed(b": ping\n\nevent: x\r\ndata: a\r\ndata:b\r\nid: 1\r\n\r\nretry: 5\n\n") == [b"a\nb"]


def test_an_event_without_an_end_is_bounded() -> None:
    with pytest.raises(EventTooLarge):
        Splitter(10).feed(b"data: 0123456789")


def test_line_separators_inside_of_json_are_escaped() -> None:
    data = '{"a":"x\u2028y\u2029z\u0085"}'
    event = encode(data.encode(), "kind").decode()
    assert event.splitlines() == ["event: kind", r'data: {"a":"x\u2028y\u2029z\u0085"}', ""]
    assert json.loads(event.split("data: ")[1]) == json.loads(data)
