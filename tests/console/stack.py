"""Consoles to test: one of a small stack, and one over events in memory.

The small stack has every service on a free port, a tiny model, and calls with chosen rewards. The events in memory are
pairs that a browser rates with the keyboard, and sixty hostile texts. A text that a browser executes sets
`window.executed` or requests `http://other.example`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import httpx2
from aiokafka import AIOKafkaProducer

from headrace import Client
from headrace.producing import client_options
from headrace.registry import ModelRegistry
from headrace.sessions import Purpose
from headrace_console.app import SecurityHeaders
from headrace_console.read_model.follower import RecordReader
from headrace_console.sources import clients
from headrace_operations.supervisor import Supervisor
from headrace_runtime.http import web
from headrace_runtime.settings.sections import SecuritySettings
from headrace_schemas import Event, Feedback, Message, Reward
from headrace_schemas.events.chat import TextPart
from headrace_schemas.http.stack_access import make_login_token
from headrace_schemas.values.ids import is_name, response_id, session_key
from tests.support import presence
from tests.support.turns import START, letter, trajectory, turn
from tests.system.program import Line, at_most, caught, equals, no_problems
from tests.unit.console.support import Bus, Stand, make_queue, session_of

MODEL = "m"
USERS = {"ann": "operator", "eve": "viewer"}
"""Role of each user. The user's token is the user's name; the setting holds its SHA-256."""
REWARDS = '''
"""Rewards that the id of the task chooses: `fail ...`, `none ...`, `equal ...`, or by the length of the answer."""


def chosen(trajectory, context):
    task = trajectory.task_id or ""
    if task.startswith("fail"):
        raise KeyError("answer")
    if task.startswith("none"):
        return None
    if task.startswith("equal"):
        return 0.5
    return (hash(trajectory.trajectory_id) % 1000) / 1000
'''
BATCHES = {
    "trainer.batch_experiences": 4,
    "trainer.batch_experiences_min": 4,
    "trainer.batch_wait_s": 1.0,
    "trainer.steps_per_version": 1,
    "trainer.save_interval_s": 0.5,
    "trainer.max_staleness": 64,
}


@dataclass(frozen=True)
class ConsoleStack:
    """A running stack, and the agent that calls its gateway."""

    supervisor: Supervisor
    folder: Path

    @property
    def url(self) -> str:
        """Address of the console."""
        return self.supervisor.url("console")

    def registry(self) -> ModelRegistry:
        """Open a client of the registry. The caller must close it."""
        return ModelRegistry(self.supervisor.url("registry"))

    def login_path(self) -> str:
        """Return a one-time path that logs the owner of the stack in."""
        return f"/login?token={make_login_token(self.folder)}"

    def call(
        self,
        task: str,
        *,
        purpose: Purpose = "train",
        ends: bool = True,
        value: float | None = None,
        **options: object,
    ) -> tuple[str, str]:
        """Play a session of one call. Return the ids of the session and of the response.

        Args:
            task: id of the task, which chooses the reward.
            purpose: purpose of the session.
            ends: whether the session ends with the call.
            value: feedback about the session.
            options: fields of the request.
        """
        with (
            Client(self.supervisor.url("gateway")) as client,
            httpx2.Client(timeout=60.0, trust_env=False) as http,
        ):
            session = client.session(task_id=task, purpose=purpose)
            body = {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": "hello"}], **options}
            reply = http.post(f"{session.base_url}/chat/completions", json=body, headers=session.headers)
            assert reply.status_code == 200, reply.text
            if value is not None:
                session.feedback(value)
            if ends:
                session.end()
            return session.session_id, reply.json()["id"]

    def feedback(self, session_id: str, value: float) -> None:
        """Send feedback about a session."""
        with Client(self.supervisor.url("gateway")) as client:
            client.session(session_id).feedback(value)

    def end(self, session_id: str) -> None:
        """End a session."""
        with Client(self.supervisor.url("gateway")) as client:
            client.session(session_id).end()

    def send_garbage(self, records: int) -> None:
        """Send invalid records of the tenant `default` to the scorer's topic."""

        async def send() -> None:
            async with AIOKafkaProducer(**client_options(self.supervisor.plan.bus)) as producer:
                for number in range(records):
                    await producer.send_and_wait("trajectories", b'{"tenant":"default"}', str(number).encode())

        asyncio.run(send())


@contextlib.contextmanager
def console_stack(folder: Path, settings: Mapping[str, object], **options: object) -> Iterator[ConsoleStack]:
    """Start the services with `settings`, wait until all are healthy, and stop them after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chosen_rewards.py").write_text(REWARDS, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environ.get("PYTHONPATH")])])
    environ["OMP_NUM_THREADS"] = "1"
    chosen = {
        "trainer.model": MODEL,
        "trainer.compute.device": "cpu",
        "inference.torch.device": "cpu",
        "scorer.functions": ["chosen_rewards:chosen"],
        **settings,
    }
    data_dir = folder / "data"
    supervisor = Supervisor(data_dir, settings=chosen, auto_ports=True, environ=environ, **options)  # type: ignore[arg-type]
    try:
        supervisor.start()
        supervisor.wait_up(180)
        yield ConsoleStack(supervisor, data_dir)
    finally:
        supervisor.stop()


_RUN = "window.executed=1"
_FOREIGN = "http://other.example/x"
_HTML = (
    f"<script>{_RUN}</script>",
    f"</pre></main><script>{_RUN}</script>",
    f"</title></head><body onload={_RUN}>",
    f"</textarea><script>{_RUN}</script>",
    f'"><script>{_RUN}</script>',
    f"'><img src=x onerror={_RUN}>",
    f"<img src={_FOREIGN}>",
    f"<img src=x onerror={_RUN}>",
    f"<iframe src={_FOREIGN}></iframe>",
    f"<iframe srcdoc='<script>parent.{_RUN}</script>'></iframe>",
    f"<object data={_FOREIGN}></object>",
    f"<embed src={_FOREIGN}>",
    f"<link rel=stylesheet href={_FOREIGN}>",
    f"<style>@import '{_FOREIGN}'; body {{ display: none }}</style>",
    "<p style='position:fixed;inset:0;background:red'>x</p>",
    f"<base href={_FOREIGN}>",
    f"<meta http-equiv=refresh content='0;url={_FOREIGN}'>",
    f"<form action={_FOREIGN}><button>Log in</button></form>",
    f"<a href='javascript:{_RUN}'>x</a>",
    f"[x](javascript:{_RUN})",
    f"![x]({_FOREIGN})",
    f"<details open ontoggle={_RUN}>",
    f"<input autofocus onfocus={_RUN}>",
    f"<video src={_FOREIGN} onerror={_RUN}></video>",
    f"<body background={_FOREIGN}>",
    f"<!--><script>{_RUN}</script>-->",
    f"<scr<script>ipt>{_RUN}</scr</script>ipt>",
    f"<SCRIPT\x0c>{_RUN}</SCRIPT\t>",
    f"&lt;script&gt;{_RUN}&lt;/script&gt;",
    f"&#60;script&#62;{_RUN}&#60;/script&#62;",
    f"\uff1cscript\uff1e{_RUN}\uff1c/script\uff1e",
    f"<template><script>{_RUN}</script></template>",
    f"<math><mtext></table><mglyph><style><img src=x onerror={_RUN}>",
)
_SVG = (
    f"<svg onload={_RUN}>",
    f"<svg><script>{_RUN}</script></svg>",
    f"<svg><use href='{_FOREIGN}#x'/></svg>",
    f"<svg><animate onbegin={_RUN} attributeName=x dur=1s>",
    f"<svg><foreignObject><img src=x onerror={_RUN}></foreignObject></svg>",
)
_HTMX = (
    f"<div hx-get='{_FOREIGN}' hx-trigger='load'>x</div>",
    "<button hx-post='/logout' hx-trigger='load'>x</button>",
    f"<div hx-on:load='{_RUN}'>x</div>",
    f"<div data-live='loop' id='live' hx-get='{_FOREIGN}'>x</div>",
    "<button aria-keyshortcuts='1' data-key='g l' name='answer' value='bad'>x</button>",
    "<hx-partial hx-target='body'>x</hx-partial>",
)
_TEMPLATES = (
    "{{ 7 * 7 }}{{ config }}{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}",
    "${7*7} #{7*7} <%= 7*7 %>",
    "%(user)s %s {0.__class__} {user.form_token}",
)
_CHARACTERS = (
    "\u202egnp.exe\u202d\u2066x\u2069",
    "\x1b[31mred\x1b]0;title\x07\x1b[2J",
    "\x9b2J\x7f\x08\x08\x08",
    "\u200b\u2028\u2029\ufeff\ufffe\U000e0001",
    "Z" + "\u0335" * 400,
    "\r\nSet-Cookie: x=1\r\n\r\n<script>window.executed=1</script>",
    "a\rb\x0bc\x0cd",
    "../../etc/passwd%00%ud83d",
)
_LONG = (
    "x" * 5_000_000,
    "<b>" * 1_700_000,
    "\u202e\x1b" * 500_000,
    "data:image/png;base64," + base64.b64encode(bytes(700_000)).decode(),
    f"data:text/html;base64,{base64.b64encode(f'<script>{_RUN}</script>'.encode()).decode()}",
)
TEXTS = (*_HTML, *_SVG, *_HTMX, *_TEMPLATES, *_CHARACTERS, *_LONG)
PROGRAM = Path(__file__).with_name("keyboard.py")
_PAIRS = 60
_SIDE_OF_KEY = {"1": 0, "2": 1}
_PAGE_S_MAX = 1.0


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Stand, Bus, str]]:
    """Serve a console whose topics and gateway are in memory. Yield the console's parts, the bus and the address."""
    bus = Bus()
    with (
        patch.object(clients, "call", bus.call),
        patch.object(RecordReader, "read", lambda _self, topic, positions: bus.read(topic, positions)),
    ):
        async with Stand(folder) as stand:
            bus.stand = stand
            settings = stand.settings.model_copy(update={"port": 0})
            guarded = SecurityHeaders(stand.console.app)
            async with web.serve(guarded, settings, SecuritySettings(), accepts_forms=True) as port:
                yield stand, bus, f"http://127.0.0.1:{port}"
                stand.console.changes.close()


def pair_lines(folder: Path, _base: Path) -> Iterator[Line]:
    """Yield the result lines of the test that rates pairs with the keyboard alone."""
    yield from asyncio.run(_rate_pairs(folder))


async def _rate_pairs(folder: Path) -> list[Line]:
    async with served(folder) as (stand, bus, url):
        await bus.add([session_of(number, answers=2)[0] for number in range(_PAIRS)])
        await make_queue(stand, question="pair", ratings="1")
        task = {"task": "pairs", "url": url, "user": "rater", "queue": "help", "keys": "1210x2", "most": 3 * _PAIRS}
        observed = await asyncio.to_thread(presence.drive, PROGRAM, task)
        rated, verdicts = observed["rated"], bus.verdicts()
    chosen = [sides[_SIDE_OF_KEY[key]] for _, *sides, key in rated if key in _SIDE_OF_KEY]
    preferences = [event.preference for event in verdicts if event.preference is not None]
    return [
        equals("distinct pairs rated by keyboard alone", len({path for path, *_ in rated}), _PAIRS),
        equals("page after the last pair", observed["end"], "/review/1"),
        equals(
            "answers that the keys 1 and 2 chose, and those of the preferences",
            [text.rpartition(" ")[2] for text in chosen],
            [str(preference.chosen.choice) for preference in preferences],
        ),
        equals(
            "verdicts `same` and `bad` of the keys 0 and x",
            [sum(event.label == label for event in verdicts) for label in ("same", "bad")],
            [sum(key == "0" for *_, key in rated), 2 * sum(key == "x" for *_, key in rated)],
        ),
        no_problems("errors in the browser's console while pairs are rated", observed["errors"]),
    ]


def hostile_lines(folder: Path, _base: Path) -> Iterator[Line]:
    """Yield the result lines of the test that opens pages with hostile texts."""
    yield from asyncio.run(_show_hostile_texts(folder))


async def _show_hostile_texts(folder: Path) -> list[Line]:
    async with served(folder) as (stand, bus, url):
        events = list(itertools.chain.from_iterable(hostile_session(*entry) for entry in enumerate(TEXTS)))
        await bus.add(events)
        _, queue = await make_queue(stand, rubric="".join(TEXTS[:20])[:4000], items_max="60")
        viewer = await stand.signed_in("viewer")
        paths = ["/sessions", "/rewards", "/dead-letters", "/review", queue, f"{queue}/agreement", "/", "/flow"]
        letters = [event for event in events if event.topic == "dead-letters"]
        paths += [f"/dead-letters/{event.event_id}" for event in letters]
        for number, text in enumerate(TEXTS):
            key, name = session_key("default", f"h{number}"), names_of(number)
            turn_path = (await viewer.get(f"/r/{name}")).headers["location"].partition("#t-")[2]
            paths += [f"/s/{key}", f"/s/{key}/turns/{turn_path}", f"/s/{key}/feedback?turn={turn_path}"]
            paths += [f"/compare?left={name}", f"/sessions?task={quote(text[:300])}", f"/{quote(text[:300], safe='')}"]
        task = {"task": "hostile", "url": url, "user": "reviewer", "paths": paths, "planted": TEXTS[0]}
        observed = await asyncio.to_thread(presence.drive, PROGRAM, task)
    seconds, slowest = observed["slowest"]
    return [
        equals("hostile texts in ids, messages, reasons, notes and errors", len(TEXTS), 60),
        equals("pages that show them", observed["pages"], len(paths)),
        no_problems("texts that were executed, or that the Content Security Policy stopped", observed["executed"]),
        no_problems("elements that texts have made", observed["injected"]),
        no_problems("requests to other origins", observed["foreign"]),
        no_problems("pages that were not shown", observed["unready"]),
        at_most(f"seconds of the slowest page ({slowest[:40]})", round(seconds, 2), _PAGE_S_MAX),
        caught("a text without escapes", by_the_suite=observed["planted"]),
    ]


def names_of(number: int) -> str:
    """Return the response id of a hostile session."""
    return response_id(session_key("default", f"h{number}"), uuid.UUID(int=number + 1))


def hostile_session(number: int, text: str) -> Sequence[Event]:
    """Return the events of a session in which every text of the caller, the model and the reward source is hostile."""
    key, name = session_key("default", f"h{number}"), names_of(number)
    label = "".join(character for character in text[:300] if is_name(character)) or "x"
    more: dict[str, Any] = {"session_key": key, "session_id": label, "task_id": label}
    parts = tuple(TextPart(text=text[at : at + 1_000_000]) for at in range(0, len(text), 1_000_000))
    answer = turn("-").choices[0].model_copy(update={"message": Message(role="assistant", content=parts)})
    run = {"trajectory_id": f"T{number}", "session_key": key, "time": START}
    call = turn(
        name, messages=(Message(role="user", content=parts),), choices=(answer,),
        time=START + timedelta(seconds=number), **more,
    )  # fmt: skip
    return [
        call,
        trajectory(f"T{number}", (name,), **more),
        Reward(source="judge:help", value=0.5, reason=text[:4000], **run),
        Feedback(time=START, feedback_id=f"f{number}", rater=label, source="notes", value=0.0, comment=text[:9000],
                 session_key=key, session_id=label, msg_ids=(name,)),
        letter(call, "scorer").model_copy(update={"error": text[:2000]}),
    ]  # fmt: skip
