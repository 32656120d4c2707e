"""Lines of `make demo NAME=swaps`: each fault of an answer, a gap or a gateway fails its own line and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks._swaps_live import SWAPS, TOKENS, Answer, StreamingClients, lines_of

OLD, NEW = "clerk@0123456789ab", "clerk@ba9876543210"
LETTERS = {OLD: "y", NEW: "n"}


def answer(version: str = OLD, gap_s: float = 0.02) -> Answer:
    """Whole, with one longest gap."""
    at_s = [0.01 * place for place in range(TOKENS)]
    at_s[-1] = at_s[-2] + gap_s
    return Answer(0.0, {version}, LETTERS[version] * TOKENS, "length", True, at_s)


def failed(answers: list[Answer], takeover_delays_s: list[float]) -> list[str]:
    lines, _ = lines_of([answer() for _ in range(9)], answers, LETTERS, takeover_delays_s, SWAPS)
    return [line.name for line in lines if not line.holds]


TOLD = [0.2] * (SWAPS + 1)
GOOD = [answer(), answer(NEW)] * 100


def test_all_hold_where_nothing_went_wrong() -> None:
    assert failed(GOOD, TOLD) == []


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda one: replace(one, error="status 503", text="", is_complete=False), "no answer failed"),
        (lambda one: replace(one, text=one.text[:-1]), "truncated"),
        (lambda one: replace(one, ended="stop"), "truncated"),
        (lambda one: replace(one, is_complete=False), "truncated"),
        (lambda one: replace(one, versions={OLD, NEW}), "two versions"),
        (lambda one: replace(one, text=one.text[:-1] + "n"), "two versions"),
    ],
)
def test_one_bad_answer_is_one_too_many(wrong: Callable[[Answer], Answer], line: str) -> None:
    (found,) = failed([*GOOD, wrong(answer())], TOLD)
    assert line in found


def test_an_answer_of_one_version_with_the_letters_of_another_is_of_two() -> None:
    assert answer().mixed({OLD: "n"})


def test_gaps_are_extra_and_at_p99() -> None:
    """Usually 20 ms: 265 ms are 245 more, 275 ms are 255."""
    slow = [answer(gap_s=0.275)] * 2
    assert failed(GOOD + slow[:1], TOLD) == []
    (found,) = failed(GOOD + slow * 5, TOLD)
    assert "extra gap" in found
    assert failed(GOOD + [answer(gap_s=0.265)] * 10, TOLD) == []


def test_gateways_that_hear_late_and_swaps_that_did_not_happen() -> None:
    (found,) = failed(GOOD, [*TOLD[:-5], *[1.2] * 5])
    assert "every gateway" in found
    (found,) = failed(GOOD, TOLD[:-1])
    assert "took over" in found


def test_a_stream_is_taken_as_it_comes() -> None:
    one = Answer(0.0)
    for data in (
        b'{"model": "m@1", "choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}',
        b'{"model": "m@1", "choices": [{"delta": {"content": "y"}, "finish_reason": null}]}',
        b'{"model": "m@2", "choices": [{"delta": {}, "finish_reason": "length"}]}',
        b"[DONE]",
    ):
        StreamingClients._take(data, one)
    assert (one.text, one.ended, one.is_complete, one.versions, len(one.at_s)) == (
        "y",
        "length",
        True,
        {"m@1", "m@2"},
        1,
    )
    StreamingClients._take(b'{"error": {"message": "gone"}}', one)
    assert one.error is not None
