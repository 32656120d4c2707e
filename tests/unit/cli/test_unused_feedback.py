"""Feedback about turns that cannot be trained is counted, by reason, from the topics alone."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_operations.turn_account import turn_account_of
from headrace_schemas import Feedback
from tests.support.account_events import KEY, START, trajectory, turn
from tests.unit.cli.http_fake import HttpFake


def feedback(name: str, *turn_ids: str, tenant: str = "default", **more: Any) -> Feedback:
    fields = {"value": 1.0} if not {"edit", "preference", "comment", "withdrawn"} & set(more) else {}
    common = {"time": START, "feedback_id": name, "session_key": KEY, "tenant": tenant, "msg_ids": turn_ids}
    return Feedback.model_validate({**common, **fields, **more})


def test_feedback_about_turns_that_cannot_be_trained_is_counted_by_their_reasons() -> None:
    turns = [turn("a"), turn("b"), turn("c", purpose="eval", session_key="pppppppppppppppp"), turn("d")]
    run = trajectory("t", ("a",), left_out={"b": "truncated_sampling", "d": "undelivered"})
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
    assert account.untaught == {"eval": 2, "truncated_sampling": 3, "truncated_sampling, undelivered": 1}
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


def test_the_command_warns_of_feedback_that_trains_nothing() -> None:
    http = HttpFake()
    http.answer("POST", "/v1/feedback", {"teaches": False, "reason": "truncated_sampling"}, status=202)
    try:
        result = CliRunner().invoke(app, ["feedback", "1", "--msg-id", "chatcmpl-x", "--base-url", http.url])
    finally:
        http.stop()
    assert (result.exit_code, "trains nothing" in result.output) == (0, True)
    assert "truncated_sampling" in result.output
