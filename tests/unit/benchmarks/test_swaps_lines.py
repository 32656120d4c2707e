"""Lines of `make demo NAME=swaps`: each fault of an answer, a gap or a gateway fails its own line and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks._swaps_live import SWAPS, TOKENS, Answer, StreamingClients, lines_of

OLD, NEW = "clerk@0123456789ab", "clerk@ba9876543210"
LETTERS = {OLD: "y", NEW: "n"}


def answer(version: str = OLD, gap_s: float = 0.02) -> Answer:
    """Return a complete answer. Its longest gap, `gap_s`, is before the last token."""
    at_s = [0.01 * index for index in range(TOKENS)]
    at_s[-1] = at_s[-2] + gap_s
    return Answer(0.0, {version}, LETTERS[version] * TOKENS, "length", True, at_s)


def failed_line_names(answers: list[Answer], takeover_delays_s: list[float]) -> list[str]:
    lines, _ = lines_of([answer() for _ in range(9)], answers, LETTERS, takeover_delays_s, SWAPS)
    return [line.name for line in lines if not line.holds]


DELAYS_S = [0.2] * (SWAPS + 1)
GOOD = [answer(), answer(NEW)] * 100


def test_all_hold_where_nothing_went_wrong() -> None:
    assert failed_line_names(GOOD, DELAYS_S) == []


@pytest.mark.parametrize(
    ("corrupt", "line"),
    [
        (lambda original: replace(original, error="status 503", text="", is_complete=False), "no answer failed"),
        (lambda original: replace(original, text=original.text[:-1]), "truncated"),
        (lambda original: replace(original, ended="stop"), "truncated"),
        (lambda original: replace(original, is_complete=False), "truncated"),
        (lambda original: replace(original, versions={OLD, NEW}), "two versions"),
        (lambda original: replace(original, text=original.text[:-1] + "n"), "two versions"),
    ],
)
def test_one_bad_answer_is_one_too_many(corrupt: Callable[[Answer], Answer], line: str) -> None:
    (line_name,) = failed_line_names([*GOOD, corrupt(answer())], DELAYS_S)
    assert line in line_name


def test_an_answer_of_one_version_with_the_letters_of_another_is_of_two() -> None:
    assert answer().mixed({OLD: "n"})


def test_gaps_are_extra_and_at_p99() -> None:
    """The usual longest gap is 20 ms; a gap of 265 ms exceeds it by 245 ms, and a gap of 275 ms by 255 ms."""
    slow = [answer(gap_s=0.275)] * 2
    assert failed_line_names(GOOD + slow[:1], DELAYS_S) == []
    (line_name,) = failed_line_names(GOOD + slow * 5, DELAYS_S)
    assert "extra gap" in line_name
    assert failed_line_names(GOOD + [answer(gap_s=0.265)] * 10, DELAYS_S) == []


def test_gateways_that_hear_late_and_swaps_that_did_not_happen() -> None:
    (line_name,) = failed_line_names(GOOD, [*DELAYS_S[:-5], *[1.2] * 5])
    assert "every gateway" in line_name
    (line_name,) = failed_line_names(GOOD, DELAYS_S[:-1])
    assert "took over" in line_name


def test_a_stream_is_taken_as_it_comes() -> None:
    streamed_answer = Answer(0.0)
    for data in (
        b'{"model": "m@1", "choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}',
        b'{"model": "m@1", "choices": [{"delta": {"content": "y"}, "finish_reason": null}]}',
        b'{"model": "m@2", "choices": [{"delta": {}, "finish_reason": "length"}]}',
        b"[DONE]",
    ):
        StreamingClients._take(data, streamed_answer)
    assert (
        streamed_answer.text,
        streamed_answer.ended,
        streamed_answer.is_complete,
        streamed_answer.versions,
        len(streamed_answer.at_s),
    ) == (
        "y",
        "length",
        True,
        {"m@1", "m@2"},
        1,
    )
    StreamingClients._take(b'{"error": {"message": "gone"}}', streamed_answer)
    assert streamed_answer.error is not None
