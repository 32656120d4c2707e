"""Tests of the Python clients: requests, retries, exceptions, and synchronous calls through `blocking`.

The public names are fixed, and an import of the client imports few modules.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar

import httpx2
import pytest

import headrace
from headrace import ApiError, AsyncClient, Client, Unreachable
from headrace.blocking import blocking
from headrace.errors import Retries

FAST = Retries(attempts=3, first_pause_s=0.001, pause_max_s=0.01)
Answer = Callable[[httpx2.Request], httpx2.Response]


class Gateway:
    """Gateway that returns the configured responses in turn, repeats the last one, and records requests."""

    def __init__(self, *answers: httpx2.Response | Exception) -> None:
        self._answers = list(answers) or [httpx2.Response(202, json={})]
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def bodies(self) -> list[dict[str, object]]:
        return [json.loads(request.content or b"{}") for request in self.requests]

    def client(self, url: str = "http://gateway:8000", **options: str) -> Client:
        return Client(url, retries=FAST, transport=httpx2.MockTransport(self), **options)  # type: ignore[arg-type]


def refusal(status: int, code: str, **headers: str) -> httpx2.Response:
    body = {"error": {"message": "no", "code": code, "param": "value", "type": "x"}}
    return httpx2.Response(status, json=body, headers=headers)


def test_session_has_base_url_and_headers_for_openai_clients() -> None:
    with Gateway().client("http://gateway:8000/v1/") as client:
        session = client.session("run 7/u", task_id="t", run_id="3")
        assert session.base_url == "http://gateway:8000/sessions/run%207%2Fu/v1"
        assert session.headers == {"X-Session-Id": "run 7/u", "X-Task-Id": "t", "X-Run-Id": "3"}
        assert client.session(purpose="eval").headers["X-Headrace-Purpose"] == "eval"
        assert client.session().session_id != client.session().session_id


def test_feedback_of_a_session_and_its_end() -> None:
    gateway = Gateway()
    with gateway.client(api_key="secret") as client, client.session("s", task_id="t") as session:
        feedback_id = session.feedback(0.5, comment="fine", context={"expected": "42"})
    assert [request.url.path for request in gateway.requests] == ["/v1/feedback", "/v1/sessions/s/end"]
    assert gateway.bodies[0] == {
        "session_id": "s",
        "task_id": "t",
        "value": 0.5,
        "comment": "fine",
        "context": {"expected": "42"},
        "feedback_id": feedback_id,
    }
    assert {request.headers["authorization"] for request in gateway.requests} == {"Bearer secret"}


def test_feedback_about_responses() -> None:
    gateway = Gateway()
    feedback_id = gateway.client().feedback(msg_ids=["a", "b"], value=0.0, source="user", feedback_id="mine")
    assert feedback_id == "mine"
    assert gateway.bodies == [{"msg_ids": ["a", "b"], "value": 0.0, "source": "user", "feedback_id": "mine"}]


@pytest.mark.parametrize(
    ("content", "teaches", "reason"),
    [
        (b'{"teaches": false, "reason": "eval"}', False, "eval"),
        (b'{"teaches": true}', True, None),
        (b'{"event_ids": []}', None, None),
        (b"[]", None, None),
        (b"", None, None),
    ],
)
async def test_feedback_id_reports_whether_the_feedback_can_train(
    content: bytes, teaches: bool | None, reason: str | None
) -> None:
    sent: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content)["feedback_id"])
        return httpx2.Response(202, content=content)

    client = Client("http://gateway:8000", transport=httpx2.MockTransport(answer))
    async with AsyncClient("http://gateway:8000", transport=httpx2.MockTransport(answer)) as other:
        feedback_ids = [
            client.feedback(msg_ids=["a"], value=1.0),
            client.session("s").feedback(1.0, response_id="a"),
            await other.feedback(msg_ids=["a"], value=1.0),
            await other.session("s").feedback(1.0, response_id="a"),
        ]
    assert [(feedback_id.teaches, feedback_id.reason) for feedback_id in feedback_ids] == [(teaches, reason)] * 4
    assert [str(feedback_id) for feedback_id in feedback_ids] == sent


def test_feedback_of_zero_is_sent_and_a_withdrawal_has_no_value() -> None:
    gateway = Gateway()
    client = gateway.client()
    client.feedback(session_id="s", value=0.0)
    client.feedback(session_id="s", withdrawn=True)
    assert [("value" in body, body.get("withdrawn")) for body in gateway.bodies] == [(True, None), (False, True)]


@pytest.mark.parametrize("ended", ["by the call", "by feedback"])
def test_a_session_ends_once(ended: str) -> None:
    gateway = Gateway()
    with gateway.client().session("s") as session:
        if ended == "by the call":
            session.end()
        else:
            session.feedback(1.0, ends_session=True)
        session.end()
    assert len(gateway.requests) == 1


def test_session_ends_if_its_block_raises() -> None:
    gateway = Gateway()
    with pytest.raises(ZeroDivisionError), gateway.client().session("s"):
        _ = 1 / 0
    assert [request.url.path for request in gateway.requests] == ["/v1/sessions/s/end"]


def test_error_of_the_block_is_raised_if_ending_fails_too() -> None:
    gateway = Gateway(refusal(401, "invalid_api_key"))
    with pytest.raises(ZeroDivisionError) as caught, gateway.client().session("s"):
        _ = 1 / 0
    assert "could not be ended" in caught.value.__notes__[0]


@pytest.mark.parametrize("trouble", [httpx2.ConnectError("refused"), httpx2.ReadTimeout("slow"), refusal(503, "x")])
def test_retried_feedback_has_the_same_id(trouble: httpx2.Response | Exception) -> None:
    gateway = Gateway(trouble, trouble, httpx2.Response(202, json={}))
    gateway.client().feedback(session_id="s", value=1.0)
    assert len({str(body["feedback_id"]) for body in gateway.bodies}) == 1
    assert len(gateway.requests) == 3


def test_refusals_are_not_repeated() -> None:
    gateway = Gateway(refusal(400, "invalid_value"))
    with pytest.raises(ApiError, match=r"no \(400, invalid_value\)") as caught:
        gateway.client().feedback(session_id="s", value=1.0)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "value")
    assert len(gateway.requests) == 1


def test_refusal_without_json_has_the_response_text() -> None:
    with pytest.raises(ApiError, match="Bad Gateway"):
        Gateway(httpx2.Response(404, text="<html>Bad Gateway")).client().feedback(session_id="s", value=1.0)


def test_unreachable_gateway_raises_unreachable() -> None:
    gateway = Gateway(httpx2.ConnectError("refused"))
    with pytest.raises(Unreachable, match=r"/v1/feedback does not answer: refused; is Headrace up\?"):
        gateway.client().feedback(session_id="s", value=1.0)
    assert len(gateway.requests) == FAST.attempts


def test_pauses_double_up_to_the_limit_and_follow_retry_after() -> None:
    retries = Retries(attempts=9, first_pause_s=1.0, pause_max_s=5.0)
    for attempt, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (8, 5.0)):
        pause_s = retries.pause_s(attempt, None)
        assert pause_s is not None
        assert most / 2 <= pause_s <= most
    assert retries.pause_s(9, None) is None
    assert retries.pause_s(1, refusal(429, "x", **{"Retry-After": "3"})) == 3.0
    assert retries.pause_s(1, refusal(429, "x", **{"Retry-After": "3600"})) == 5.0


@pytest.mark.parametrize("bad", ["", "a\nb", "ü", "x" * 513])
def test_ids_that_are_invalid_in_headers_are_refused(bad: str) -> None:
    client = Gateway().client()
    with pytest.raises(ValueError, match="printable ASCII"):
        client.session("s", task_id=bad)


def test_msg_ids_given_as_one_string_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a list of response ids"):
        Gateway().client().feedback(msg_ids="chatcmpl-1", value=1.0)


async def test_async_client_sends_the_same_requests() -> None:
    plain, later = Gateway(), Gateway(refusal(503, "x"), httpx2.Response(202, json={}))
    with plain.client() as client, client.session("s", task_id="t", run_id="r") as session:
        session.feedback(1.0, feedback_id="f", comment="c")
    transport = httpx2.MockTransport(later)
    async with AsyncClient("http://gateway:8000", retries=FAST, transport=transport) as client_later:
        async with client_later.session("s", task_id="t", run_id="r") as session_later:
            assert (session_later.base_url, session_later.headers) == (session.base_url, session.headers)
            await session_later.feedback(1.0, feedback_id="f", comment="c")
        assert len(await asyncio.gather(*(client_later.feedback(session_id="x", value=0.0) for _ in range(3)))) == 3
    assert later.bodies[1:3] == plain.bodies


def test_address_without_a_scheme_is_refused_with_the_remedy() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=r"must begin with http:// or https://; write http://127\.0\.0\.1:8000"):
            kind("127.0.0.1:8000")


async def test_feedback_names_a_value_that_is_a_word() -> None:
    pattern = r"^value = 'good': must be a number, True or False; send a word as label= or comment=$"
    with Client("http://127.0.0.1:9") as client, pytest.raises(TypeError, match=pattern):
        client.feedback("good", session_id="run-7")  # type: ignore[arg-type]
    async with AsyncClient("http://127.0.0.1:9") as other:
        with pytest.raises(TypeError, match=pattern):
            await other.session("run-7").feedback("good")  # type: ignore[arg-type]


WHERE: ContextVar[str] = ContextVar("where", default="nowhere")


async def loop_thread_and_context() -> tuple[asyncio.AbstractEventLoop, str, str]:
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread().name, WHERE.get()


def test_blocking_runs_all_coroutines_on_one_loop_in_the_callers_context() -> None:
    token = WHERE.set("here")
    try:
        first, second = blocking(loop_thread_and_context()), blocking(loop_thread_and_context())
    finally:
        WHERE.reset(token)
    assert first[0] is second[0]
    assert first[2] == "here"
    assert blocking(loop_thread_and_context())[2] == "nowhere"


async def test_blocking_works_while_a_loop_is_running() -> None:
    assert blocking(loop_thread_and_context())[0] is not asyncio.get_running_loop()


def test_nested_blocking_does_not_deadlock() -> None:
    async def nested() -> asyncio.AbstractEventLoop:
        return blocking(loop_thread_and_context())[0]

    async def in_a_thread() -> asyncio.AbstractEventLoop:
        return (await asyncio.to_thread(lambda: blocking(loop_thread_and_context())))[0]

    loop = blocking(loop_thread_and_context())[0]
    assert blocking(nested()) is not loop
    assert blocking(in_a_thread()) is loop


def test_blocking_raises_the_error_of_the_coroutine() -> None:
    async def fails() -> None:
        raise ValueError("as it should")

    with pytest.raises(ValueError, match="as it should"):
        blocking(fails())


EXPORTS = [
    "ApiError", "AsyncClient", "AsyncSession", "Client", "HeadraceError", "ModelManager", "Session", "Unreachable",
]  # fmt: skip


def test_the_public_names_are_frozen() -> None:
    assert sorted(headrace.__all__) == EXPORTS
    for name in EXPORTS:
        assert getattr(headrace, name).__name__ == name
    assert dir(headrace) == EXPORTS


def test_earlier_names_of_renamed_functions_and_classes_still_import() -> None:
    from headrace_integrations import practice, shadow

    assert practice.practise is practice.train_on_tasks
    assert practice.asked is practice.call_agent
    assert shadow.Door is shadow.TrajectorySink
    assert shadow.HeadraceDoor is shadow.HeadraceSink
    assert shadow.TrinityDoor is shadow.TrinitySink


def test_one_error_tree() -> None:
    assert issubclass(headrace.ApiError, headrace.HeadraceError)
    assert issubclass(headrace.Unreachable, headrace.HeadraceError)


HEAVY = {"aiokafka", "asyncio", "fsspec", "http", "httpx2", "numpy", "pydantic", "rich", "ssl", "typer"}
"""Modules with long import times. A program imports them only where it uses them; a benchmark measures the
seconds."""
MODULES_MAX = 120
"""Limit on modules of the standard library and of Headrace; about 75 today, which depends on the Python version."""


def imported(statement: str) -> set[str]:
    """Return the modules that `statement` imports in a new interpreter."""
    code = f"import sys; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


@pytest.mark.parametrize("statement", ["import headrace", "from headrace import ApiError, Client, Session"])
def test_importing_the_client_imports_little(statement: str) -> None:
    names = imported(statement)
    assert not HEAVY & names
    assert len(names) < MODULES_MAX, sorted(names)


def test_making_a_client_imports_no_event() -> None:
    """A program of an agent needs the HTTP client, but no module of the bus."""
    names = imported("from headrace import Client; Client().session('s', task_id='t')")
    assert "httpx2" in names
    assert not {"pydantic", "aiokafka"} & names
    assert not [name for name in names if name.startswith("headrace_schemas.events")]
