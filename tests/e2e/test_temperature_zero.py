"""An agent at temperature 0 improves from its users' corrections by `sft`, on the whole stack with a tiny model.

No policy gradient can train such answers, because greedy decoding has no distribution.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from openai import OpenAI

from tests.support import tiny_model
from tests.support.service_process import HeadraceUp

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

MODEL = "clerk"
ANSWERS = {"Who reads the mail?": "the agent", "When was the meeting?": "Monday", "What is it about?": "an invoice"}
COPIES = 4
"""Sessions in which each question comes before the next version."""
ROUNDS_MAX = 20
SETTINGS: dict[str, object] = {
    "trainer.model": MODEL,
    "trainer.algorithm": "sft",
    "trainer.batch_experiences": COPIES * len(ANSWERS),
    "trainer.batch_experiences_min": 1,
    "trainer.batch_wait_s": 2.0,
    "trainer.steps_per_version": 1,
    "trainer.loss.updates_per_step": 8,
    "trainer.optimizer.learning_rate": 3e-3,
    "scorer.reward_wait_s": 0.5,
}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[HeadraceUp]:
    base = tiny_model.build(tmp_path / "base", layers=1)
    config = tmp_path / "headrace.toml"
    config.write_text("", encoding="utf-8")
    stack = HeadraceUp(tmp_path / "data", config, {**SETTINGS, "trainer.base": str(base)}, {})
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def ask(client: OpenAI, question: str) -> tuple[str, str, str]:
    """Return the id, the version and the text of an answer at temperature 0."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=12,
        extra_headers={"X-Session-Id": uuid4().hex},  # another session may be answered by another version
    )
    return answer.id, answer.model, answer.choices[0].message.content or ""


def correct(http: httpx2.Client, response_id: str, text: str) -> None:
    """Send the right answer, and the thumb that `sft` has no use for."""
    edit = http.post("/feedback", json={"response_id": response_id, "edit": text, "ends_session": True})
    assert (edit.status_code, edit.json()["teaches"]) == (202, True), edit.text
    thumb = http.post("/feedback", json={"response_id": response_id, "value": 0})
    assert {name: thumb.json()[name] for name in ("teaches", "reason")} == {"teaches": False, "reason": "no_signal"}


def wait_for_next_version(client: OpenAI, version: str) -> None:
    deadline = time.monotonic() + 120
    while ask(client, "Is there a new version?")[1] == version:
        assert time.monotonic() < deadline, f"{version} is still the champion"
        time.sleep(0.5)


def test_corrected_answers_become_right(up: HeadraceUp) -> None:
    client = OpenAI(base_url=up.base_url, api_key="none")
    right: list[int] = []
    corrections = 0
    with httpx2.Client(base_url=up.base_url, timeout=20, trust_env=False) as http:
        for _ in range(ROUNDS_MAX):
            answers = {question: ask(client, question) for question in ANSWERS}
            right.append(sum(text == ANSWERS[question] for question, (_, _, text) in answers.items()))
            if right[-1] == len(ANSWERS):
                break
            for question, expected in ANSWERS.items():
                for _ in range(COPIES):
                    correct(http, ask(client, question)[0], expected)
                    corrections += 1
            wait_for_next_version(client, next(iter(answers.values()))[1])
    assert (right[0], right[-1]) == (0, len(ANSWERS)), f"right answers by round: {right}"
    account: dict[str, Any] = up.status()["account"]  # type: ignore[assignment]
    assert account["trained"] >= corrections
    assert account["untaught"] == {"no_signal": corrections}, "each thumb is named"
    assert account["tokens"].keys() == {"left_out"}, "no token had a distribution"
