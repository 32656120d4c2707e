"""Tests of the fences that need a running Headrace, which is started as in the README."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from headrace import Client
from headrace_schemas import Turn
from tests.docs.fences import ROOT, Fence, executed
from tests.docs.stack import BATCH, FOLLOWED, MODEL, Missing, Stack, Trail, follow, read, running

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WAIT_S = 120.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Yield one running Headrace for all pages."""
    with running(tmp_path_factory.mktemp("stack")) as started:
        yield started


async def test_a_turn_takes_the_way_of_the_story(stack: Stack) -> None:
    """Follow a turn through `docs/life-of-a-trajectory.md`: its steps are exactly those on the page.

    This test is the first on its stack, because waiting experiences of others would enter its batches.
    """
    calls = [call(stack, number) for number in range(2 * BATCH)]
    turn_ids = await asyncio.gather(*calls)
    trail = await until_followed(stack, turn_ids[0])
    assert trail.steps == FOLLOWED
    before = {turn.version for turn in (await read(stack.bus)).of(Turn) if turn.turn_id in turn_ids}
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=30) as http:
        answer = await ask(http, "walk-on", "And now?")
    assert answer["model"].startswith(f"{MODEL}@")
    assert answer["model"] not in before, "the swapped weights answer"


async def call(stack: Stack, number: int) -> str:
    """Send a session with one turn and alternately good or bad feedback. Return the turn's id."""
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


@pytest.mark.parametrize("fence", executed(stack=True), ids=lambda fence: fence.label)
def test_code_runs_on_a_running_headrace(fence: Fence, stack: Stack) -> None:
    stack.add_files(ROOT / fence.page)
    stack.run(fence)
