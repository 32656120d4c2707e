"""`docs/life-of-a-trajectory.md` is true: of the code, and of a turn that really takes this way."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
import yaml

from headrace import Client
from headrace_schemas import EVENTS, Turn
from tests.docs.fences import ROOT
from tests.docs.stack import BATCH, MODEL, Stack
from tests.docs.trail import Missing, Trail, follow, read
from tests.docs.walk import Name, Step, definition, every_name, steps, used_by

TOPICS = ROOT / "schemas" / "src" / "headrace_schemas" / "topics"
FOLLOWED = ["turns", "feedback", "trajectories", "rewards", "experiences", "training-metrics", "checkpoints",
            "model-events", "routing", "replicas"]  # fmt: skip
OF_STEP = [pytest.param(step, id=f"{number}-{step.service}") for number, step in enumerate(steps(), 1)]
WAIT_S = 120.0


@pytest.mark.parametrize("name", every_name(), ids=lambda name: name.qualified)
def test_what_is_named_exists(name: Name) -> None:
    assert name.path.exists(), f"no file {name.path.relative_to(ROOT)}"
    assert definition(name) is not None, f"no {name}"


@pytest.mark.parametrize("step", OF_STEP)
def test_the_order_of_the_story_is_that_of_the_code(step: Step) -> None:
    """In each point, what comes later is used by something that comes before it."""
    assert step.points, "a step without a function"
    for names in step.points:
        before: set[str] = set()
        for name in names:
            called = name.qualified.split(".")[-2] if name.simple == "__call__" else name.simple
            assert not before or called in before, f"nothing before {name} uses it: {[str(one) for one in names]}"
            before |= used_by(name)


@pytest.mark.parametrize("step", OF_STEP)
def test_topics_have_the_producer_and_the_consumer_that_the_page_says(step: Step) -> None:
    for topic in step.reads | step.writes:
        described = yaml.safe_load((TOPICS / f"{topic}.yaml").read_text(encoding="utf-8"))
        if topic in step.reads:
            assert step.service in described["consumers"], f"{step.service} does not read {topic}"
        elif topic != "dead-letters":  # everybody's
            assert step.service == described["producer"], f"{step.service} does not write {topic}"


def test_the_trail_goes_through_every_topic_that_the_page_writes() -> None:
    written = {topic for step in steps() for topic in step.writes}
    assert written == {*FOLLOWED, "session-ends", "dead-letters"}
    assert written <= EVENTS.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_turn_takes_this_way(stack: Stack) -> None:
    calls = [call(stack, number) for number in range(2 * BATCH)]
    turn_ids = await asyncio.gather(*calls)
    trail = await until_followed(stack, turn_ids[0])
    assert trail.found == FOLLOWED
    before = {turn.version for turn in (await read(stack.bus)).of(Turn) if turn.turn_id in turn_ids}
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=30) as http:
        answer = await ask(http, "walk-on", "And now?")
    assert answer["model"].startswith(f"{MODEL}@")
    assert answer["model"] not in before, "the swapped weights answer"


async def call(stack: Stack, number: int) -> str:
    """A session of one turn, judged well or badly in turns. Returns the turn's id."""
    session = f"walk-{number}"
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=60) as http:
        answer = await ask(http, session, "Who sent the mail about the meeting?")

    def judge() -> None:
        with Client(stack.gateway) as client, client.session(session, task_id="walk") as judged:
            judged.feedback(float(number % 2))

    await asyncio.to_thread(judge)
    return str(answer["id"])


async def ask(http: httpx.AsyncClient, session: str, text: str) -> dict[str, str]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    response = await http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": session})
    assert response.status_code == 200, response.text
    answer: dict[str, str] = response.json()
    return answer


async def until_followed(stack: Stack, turn_id: str) -> Trail:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return follow(await read(stack.bus), turn_id)
        except Missing:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)
