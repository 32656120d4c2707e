"""Tests of commands that read topics.

They cover time ranges, JSON output, invalid records (which do not end a command), traces between versions, sessions and
training data, and the count of feedback about turns that cannot be trained, by reason.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace import topics
from headrace.errors import UsageError
from headrace.topics import Entry
from headrace_cli.app import app
from headrace_cli.commands.replay import entry_as_json
from headrace_cli.commands.shared import parse_time
from headrace_operations.lineage.sessions import trace_session
from headrace_operations.lineage.versions import trace_version
from headrace_operations.mirror.logs import translate_positions
from headrace_operations.mirror.side import Row
from headrace_operations.turn_account import TurnAccountBuilder, turn_account_of
from headrace_schemas import Checkpoint, Feedback, Sampling, Trajectory
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.values.blobs import BlobRef
from tests.support.presence import draw_seed
from tests.support.training_history import History, assert_traces_agree, in_memory, made_up
from tests.support.turns import KEY, START, VERSION, ask, experience, report, trajectory, turn, user, verdict
from tests.unit.cli.doubles import HttpFake


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        (None, None),
    ],
)
def test_times(text: str | None, expected: datetime | None) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5min", 300), ("5m", 300), ("1.5h", 5400), ("7d", 604_800)]
)
def test_times_ago(text: str, seconds: float) -> None:
    time = parse_time(text)
    assert time is not None
    assert abs((datetime.now(UTC) - time) - timedelta(seconds=seconds)) < timedelta(seconds=5)


@pytest.mark.parametrize("text", ["yesterday", "99999999999d", "9" * 400 + "s", "2026-13-01"])
def test_nonsense_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match=f"'{text[:20]}.* is not a time"):
        parse_time(text)


def test_a_line_has_the_position_of_the_record_and_the_complete_event() -> None:
    event = trajectory("T", ("ü",))
    line = entry_as_json(Entry("trajectories", 1, 7, START, event.key, event))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("event") == json.loads(event.to_json())
    assert fields == {
        "topic": "trajectories", "partition": 1, "offset": 7, "time": "2026-01-01T00:00:00+00:00", "key": event.key,
        "id": event.event_id, "type": "headrace.trajectory.v1",
    }  # fmt: skip


def test_a_line_about_a_record_that_is_no_event() -> None:
    fields = json.loads(entry_as_json(Entry("turns", 0, 1, START, "k", None, "value: Invalid JSON")))
    assert fields["problem"] == "value: Invalid JSON"
    assert "event" not in fields


@pytest.mark.parametrize("timestamp", [2**62, -(2**62), -1, 0, None, 1e300])
@pytest.mark.parametrize("value", [b"", b"{", b"[" * 200_000, b"\xff", None, b'{"time": 1e308}'], ids=range(6))
async def test_an_entry_of_any_record(timestamp: Any, value: bytes | None) -> None:
    message: Any = SimpleNamespace(
        topic="turns", partition=0, offset=7, key=b"\xff\x00", value=value, headers=(), timestamp=timestamp
    )
    entry = await topics._entry(message)
    assert (entry.offset, entry.event) == (7, None)
    assert entry.problem


@pytest.mark.parametrize("error", [ValueError, OverflowError, RecursionError, KeyError, UnicodeError])
def test_an_event_that_breaks_the_account_is_a_problem_of_it(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    turns = [ask([user(f"q{number}")], session=f"s{number}", at=number) for number in range(3)]
    real = TurnAccountBuilder.add

    def add(self: TurnAccountBuilder, event: Any) -> None:
        if event.event_id == turns[1].event_id:
            raise error("poison \x1b[31m \ud83d")
        real(self, event)

    monkeypatch.setattr(TurnAccountBuilder, "add", add)
    builder = TurnAccountBuilder()
    for number, event in enumerate(turns):
        builder.add_or_note(event, f"turns[0]@{number}")
    account = builder.close()
    assert (account.captured, account.problems_total) == (2, 1)
    assert "turns[0]@1" in account.problems[0]


@pytest.mark.parametrize("repetition", range(10))
async def test_short_histories_with_much_going_back_and_forth(repetition: int) -> None:
    history = made_up(draw_seed(), 30, 25)
    await assert_traces_agree(in_memory(history.events), history)


async def test_the_trace_of_a_session_has_the_reason_for_turns_without_experience() -> None:
    history = History(random.Random(3))
    history.begin()
    for number in range(60):
        history.session(number)
    topics = in_memory(history.events)
    for event in history.events:
        if isinstance(event, Trajectory):
            trace = await trace_session(topics, event.session_id, tenant="default", after=0, limit=10)
            (run,) = (run for run in trace.runs if run.trajectory_id == event.trajectory_id)
            assert run.held_out == ("eval" if event.purpose == "eval" else event.untrained)
            assert run.left_out == {item.turn_id: item.reason for item in event.left_out}


async def test_unknown_sessions_and_versions_are_errors() -> None:
    topics = in_memory([])
    with pytest.raises(UsageError, match="no trainer has reported this version"):
        await trace_version(topics, "m@0123456789ab", everything=False, after=0, limit=1)
    with pytest.raises(UsageError, match="session 'nobody' of tenant 'acme'"):
        await trace_session(topics, "nobody", tenant="acme", after=0, limit=1)


def feedback(name: str, *turn_ids: str, tenant: str = "default", **more: Any) -> Feedback:
    fields = {"value": 1.0} if not {"edit", "preference", "comment", "withdrawn"} & set(more) else {}
    common = {"time": START, "feedback_id": name, "session_key": KEY, "tenant": tenant, "msg_ids": turn_ids}
    return Feedback.model_validate({**common, **fields, **more})


def test_feedback_about_turns_that_cannot_be_trained_is_counted_by_their_reasons() -> None:
    turns = [turn("a"), turn("b"), turn("c", purpose="eval", session_key="pppppppppppppppp"), turn("d")]
    run = trajectory("t", ("a",), left_out={"b": "retried", "d": "undelivered"})
    sides = {"chosen": {"turn_id": "a"}, "rejected": {"turn_id": "b"}}
    judged = [
        feedback("taught", "a"),
        feedback("both", "a", "b"),
        feedback("session"),
        feedback("unknown", "x"),
        feedback("half known", "b", "x"),
        feedback("task", level="task", task_id="t"),
        feedback("only a fact", "b", comment="why"),
        feedback("withdrawn", "b", withdrawn=True),
        feedback("of another tenant", "b", tenant="other"),
        feedback("thumb", "b"),
        feedback("edit", "b", edit={"role": "assistant", "content": "better"}),
        feedback("two reasons", "b", "d"),
        feedback("evaluation", "c"),
        feedback("session of an evaluation", session_key="pppppppppppppppp"),
        feedback("one side", "a", "b", preference=sides),
    ]
    account = turn_account_of([*turns, run, *judged, *judged])
    assert account.untaught == {"eval": 2, "retried": 3, "retried, undelivered": 1}
    assert account.consistent


def test_feedback_in_several_sessions_is_used_if_one_of_them_is_trained() -> None:
    other = "pppppppppppppppp"
    turns = [turn("a"), turn("b", session_key=other)]
    runs = [
        trajectory("t", ("a",)),
        trajectory("u", left_out={"b": "empty"}, session_key=other),
    ]
    judged = [feedback("f", "a", sessions=2), feedback("f", "b", sessions=2, session_key=other)]
    assert turn_account_of([*turns, *runs, *judged]).untaught == {}
    assert turn_account_of([*turns, *runs, judged[1]]).untaught == {"empty": 1}


ALGORITHMS: dict[str, tuple[bool, bool, bool, bool, dict[str, int]]] = {
    "reinforce++": (True, False, False, True, {"no_signal": 4, "truncated_sampling": 1}),
    "mix": (True, True, False, True, {"no_signal": 2, "truncated_sampling": 1}),
    "sft": (False, True, False, False, {"no_signal": 5}),
    "dpo": (False, True, True, False, {"no_signal": 3}),
    "kto": (True, True, True, False, {}),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_feedback_is_counted_by_the_algorithm_of_its_model(algorithm: str) -> None:
    """A reward of `greedy` may train `free`, which is in the same branch. `alone` has a branch without logprobs."""
    *kinds, expected = ALGORITHMS[algorithm]
    learns = dict(zip(("rewards", "edits", "preferences", "logprobs"), kinds, strict=True))
    greedy = {"sampling": Sampling(temperature=0.0)}
    turns = [turn("free"), turn("greedy", **greedy), turn("alone", **greedy)]
    branches = ("free", "greedy"), ("alone",)
    run = trajectory("T", *branches)
    without = tuple(
        branch.model_copy(
            update={
                "spans": tuple(
                    span
                    if span.turn_id == "free"
                    else span.model_copy(update={"logprobs": (0.0,), "no_logprobs": "truncated_sampling"})
                    for span in branch.spans
                )
            }
        )
        for branch in run.branches
    )
    events = [experience(f"e{number}", *names) for number, names in enumerate(branches)]
    sides = {"chosen": {"turn_id": "greedy"}, "rejected": {"turn_id": "alone"}}
    more = {"chosen": {"turn_id": "free"}, "rejected": {"turn_id": "alone"}}
    judged = [
        feedback("thumb of the run", "free"),
        feedback("thumb of an answer of the run", "greedy"),
        feedback("thumb of another answer", "alone"),
        feedback("edit", "alone", edit={"role": "assistant", "content": "better"}),
        feedback("edit of another answer", "greedy", edit={"role": "assistant", "content": "better"}),
        feedback("preference", "greedy", "alone", preference=sides),
        feedback("preference of a free answer", "free", "alone", preference=more),
    ]
    blob = BlobRef(uri="memory://m", sha256="0" * 64, size=1)
    announced = Checkpoint(
        time=START, model="m", version=VERSION, lineage="main", step=0, manifest=blob,
        learns=LearnedSignals.model_validate({"algorithm": algorithm, **learns}),
    )  # fmt: skip
    evaluation = turn("played by the gate", purpose="eval", **greedy)
    account = turn_account_of(
        [*turns, evaluation, run.model_copy(update={"branches": without}), *events, *judged, announced, report()]
    )
    assert account.untaught == expected
    assert account.tokens == {"free": 1, "left_out": 2}, "without the evaluation"
    assert account.consistent


def test_feedback_about_versions_of_another_lineage_is_counted() -> None:
    run, experiences = trajectory("T", ("a",), ("b",)), [experience("x", "a"), experience("y", "b")]
    outcomes = report(verdict("x", "a", dropped="foreign_version"), verdict("y", "b"))
    judged = [feedback("dropped", "a"), feedback("trained", "b"), feedback("both", "a", "b")]
    assert turn_account_of([turn("a"), turn("b"), run, *experiences, outcomes, *judged]).untaught == {
        "foreign_version": 1
    }


def test_the_command_warns_of_feedback_that_trains_nothing() -> None:
    http = HttpFake()
    http.answer("POST", "/v1/feedback", {"teaches": False, "reason": "truncated_sampling"}, status=202)
    try:
        result = CliRunner().invoke(app, ["feedback", "1", "--msg-id", "chatcmpl-x", "--base-url", http.url])
    finally:
        http.stop()
    assert (result.exit_code, "trains nothing" in result.output) == (0, True)
    assert "truncated_sampling" in result.output


class TableSide:
    """Side of a mirror with one compacted partition. Counts its reads."""

    def __init__(self, keys: Sequence[int | None]) -> None:
        """`keys` are the keys by offset, None for a record that compaction has removed."""
        self._keys = keys
        self.reads = 0

    async def bounds(self, partitions: Sequence[str]) -> dict[str, tuple[int, int]]:
        return {partition: (0, len(self._keys)) for partition in partitions}

    async def read(self, _partition: str, start: int, end: int) -> AsyncIterator[tuple[int, Row]]:
        self.reads += 1
        for offset in range(start, end):
            if (key := self._keys[offset]) is not None:
                yield offset, Row(b"%d" % key, b"", (), 0)


@pytest.mark.parametrize("seed", range(20))
async def test_positions_in_a_table_are_translated_with_one_read_for_all_groups(seed: int) -> None:
    draw = random.Random(seed)
    keys = [draw.choice([None, *range(12)]) for _ in range(draw.randrange(1, 60))]
    copied = list(dict.fromkeys(key for key in reversed(keys) if key is not None))[::-1]
    shuffled = draw.sample(copied, len(copied)) + draw.sample(range(12, 15), draw.randrange(3))
    source, target = TableSide(keys), TableSide(shuffled)
    positions = range(len(keys) + 1)
    translated = await translate_positions(source, target, "partition", positions)  # type: ignore[arg-type]
    newest = {key: offset for offset, key in enumerate(keys)}
    for position in positions:
        later = [at for at, key in enumerate(shuffled) if newest.get(key, position) >= position]
        assert translated[position] == min(later, default=len(shuffled))
    assert (source.reads, target.reads) == (1, 1)
