"""The number of values in a JSON text is known before it is parsed."""

from __future__ import annotations

import json
import random

import pytest

from headrace_runtime.kafka import wire
from headrace_runtime.kafka.wire import more_values_than


def separators(value: object) -> int:
    """Count the openings and separators of `value` by definition, by recursion."""
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + sum(map(separators, value.values()))
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(separators, value))
    return 0


def drawn(rng: random.Random, depth: int = 4) -> object:
    kind = rng.randrange(5 if depth else 2)
    if kind == 0:
        return rng.randrange(100)
    if kind <= 2:
        return "".join(rng.choice('a,[{"\\\\"é\n') for _ in range(rng.randrange(12)))
    if kind == 3:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {str(drawn(rng, 0)): drawn(rng, depth - 1) for _ in range(rng.randrange(5))}


@pytest.mark.parametrize("portion", [1, 2, 3, 7, 1000])
def test_what_stands_in_strings_does_not_count(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    monkeypatch.setattr(wire, "_PORTION_BYTES", portion + 1)  # a portion holds an escape as a whole
    for _ in range(200):
        value = [drawn(rng), ",,,[[[{{{"]
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        count = separators(value)
        assert not more_values_than(body, count), body
        assert more_values_than(body, count - 1), body


@pytest.mark.parametrize("body", [b'"' + b",[{" * 5, b'["\\', b',,,"\\', b'"\\"\\', b"", b'"', b"\\"])
def test_what_is_no_json_ends_too(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PORTION_BYTES", 2)
    assert more_values_than(body, 2) == (body.startswith(b",,,"))


def test_text_full_of_commas_is_one_value() -> None:
    assert not more_values_than(json.dumps({"content": "1,2,3\n" * 500_000}).encode(), 10)


@pytest.mark.parametrize("portion", [2, 1000])
def test_objects_and_lists_are_counted_by_themselves(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    monkeypatch.setattr(wire, "_PORTION_BYTES", portion)
    for _ in range(100):
        body = json.dumps([drawn(rng), [1, 2, 3], "[{" * 9]).encode()
        containers = opened(json.loads(body))
        assert not more_values_than(body, 10**6, containers), body
        assert more_values_than(body, 10**6, containers - 1), body


def opened(value: object) -> int:
    """The objects and lists of `value`, by recursion."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + sum(map(opened, inside))
