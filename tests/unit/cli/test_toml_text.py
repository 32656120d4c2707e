"""Values written as TOML are equal after they are read with the parser of the settings."""

from __future__ import annotations

import math
import random
import tomllib
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from headrace_operations.toml_text import key, toml


def read(value: object) -> object:
    return tomllib.loads(f"value = {toml(value)}")["value"]


VALUES: tuple[object, ...] = (
    True, 0, -7, 2**62, 0.1, 1e300, 1e-7, math.inf, -math.inf, "", "plain", 'a "quoted" \\ path', "tab\tand\nline",
    "DEL \x7f and \x00 and \x1f", "é 日本 😀", [], [1, [2.5, "x"]], {}, {"a": 1, "*": 2.0, "a b": {"ü": ["\x7f"]}},
    date(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_read_back(value: object) -> None:
    assert read(value) == value


def test_not_a_number_is_read_back() -> None:
    assert math.isnan(float(str(read(math.nan))))
    assert toml([math.nan, math.inf]) == "[nan, inf]"


def test_every_character_is_read_back() -> None:
    for start in range(0, 0x11000, 256):
        text = "".join(map(chr, (code for code in range(start, start + 256) if not 0xD800 <= code < 0xE000)))
        assert read(text) == text


def test_random_texts_are_read_back() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(500):
        text = "".join(
            chr(draw.choice([draw.randrange(0x20), 0x7F, 0x22, 0x5C, draw.randrange(0x80)])) for _ in range(8)
        )
        assert read({text: [text]}) == {text: [text]}


def test_a_path_is_its_text_and_a_key_is_quoted_where_it_has_to_be() -> None:
    assert toml(Path("models/base")) == '"models/base"'
    assert [key(name) for name in ("port", "a-b_1", "*", "a b", "")] == ["port", "a-b_1", '"*"', '"a b"', '""']


def test_values_without_a_toml_form_are_refused() -> None:
    for value in (None, [None], {"a": object()}):
        with pytest.raises(TypeError, match="TOML has no"):
            toml(value)
