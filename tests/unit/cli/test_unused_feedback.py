"""Feedback about turns that cannot be trained is counted, by reason, from the topics alone."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_operations.turn_account import turn_account_of
from headrace_schemas import Checkpoint, Feedback, Sampling
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.values.blobs import BlobRef
from tests.support.account_events import KEY, START, VERSION, experience, report, trajectory, turn, verdict
from tests.unit.cli.http_fake import HttpFake


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
    """A value of `greedy` may train `free`, which is in its branch; `alone` has a branch without logprobs."""
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
    account = turn_account_of(
        [*turns, run.model_copy(update={"branches": without}), *events, *judged, announced, report()]
    )
    assert account.untaught == expected
    assert account.tokens == {"free": 1, "left_out": 2}
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
