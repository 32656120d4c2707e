"""Tests of learning on the whole stack: `headrace controls` from a recording to its table, and `sft` at temperature 0.

The recorded runs were rewarded for one letter that the model hardly ever writes, and the gate's program looks for it:
the true reward can be learned from tokens alone, shuffled rewards cannot. An agent at temperature 0 improves from its
users' corrections by `sft`; no policy gradient can train such answers, because greedy decoding has no distribution.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from openai import OpenAI

from headrace_schemas import Branch, Experience, RewardPart, Span
from headrace_schemas.values.ids import session_key
from tests.support import tiny_model
from tests.support.service_process import HEADRACE, HeadraceUp

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
QUESTION = "Who sent the mail about the meeting on Monday at 10:30?"
ANSWER_TOKENS, RUNS = 6, 320
PROGRAM = """
import json, sys
from openai import OpenAI
llm = OpenAI(base_url=sys.argv[1], api_key="none", default_headers={"X-Headrace-Purpose": "eval"})
print(json.dumps({"gate": ["g"], "audit": ["a", "b"]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    said = llm.chat.completions.create(
        model=asked["version"], seed=asked["seed"], max_tokens=%d,
        messages=[{"role": "user", "content": %r}],
    )
    score = float(%r in (said.choices[0].message.content or ""))
    print(json.dumps(asked | {"score": score}), flush=True)
"""
WANTED = "a"


def recording(base: Path, draw: random.Random) -> list[Experience]:
    """Return the base's sampled answers to the question, with 1 for the letter in question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    torch.manual_seed(draw.randrange(2**31))
    rows = torch.tensor([prompt] * RUNS)
    logprobs = torch.zeros(RUNS, 0)
    with torch.no_grad():
        for _ in range(ANSWER_TOKENS):
            all_logprobs = model(input_ids=rows).logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(all_logprobs.exp(), 1)
            logprobs = torch.cat([logprobs, all_logprobs.gather(1, chosen)], 1)
            rows = torch.cat([rows, chosen], 1)
    answers = rows[:, len(prompt) :].tolist()
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    pairs = zip(answers, logprobs.tolist(), texts, strict=True)
    return [_experience(n, prompt, *pair[:2], float(WANTED in pair[2])) for n, pair in enumerate(pairs)]


def _experience(number: int, prompt: list[int], answer: list[int], logprobs: list[float], reward: float) -> Experience:
    name = str(number)
    span = Span(start=len(prompt), logprobs=tuple(logprobs), turn_id=name, version="m@000000000000")
    return Experience(
        time=datetime(2026, 11, 20, tzinfo=UTC),
        experience_id=name,
        trajectory_id=name,
        session_key=session_key("default", name),
        session_id=name,
        task_id="letter",
        model="m",
        branch=Branch(token_ids=(*prompt, *answer), spans=(span,)),
        reward=reward,
        parts=(RewardPart(source="function:letter", value=reward, weight=1.0),),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("controls")
    base = tiny_model.build(folder / "base", layers=1)
    (folder / "gate.py").write_text(PROGRAM % (ANSWER_TOKENS, QUESTION, WANTED))
    experiences = recording(base, random.Random(0))
    (folder / "recorded.jsonl").write_text("".join(experience.to_json().decode() + "\n" for experience in experiences))
    (folder / "headrace.toml").write_text(
        f"""
[trainer]
base = {json.dumps(str(base))}
model = "m"
steps_per_version = 1
max_staleness = 4
[trainer.optimizer]
learning_rate = 1e-2
[registry.gate]
command = ["{{python}}", {json.dumps(str(folder / "gate.py"))}, "{{base_url}}"]
"""
    )
    controls = [word for name in ("true", "shuffled", "learning rate 0") for word in ("--only", name)]
    command = [HEADRACE, "controls", "--from", "recorded.jsonl", "--config", "headrace.toml", "--json", *controls]
    command += ["--plays", "100", "--seeds", "1", "--out", "out"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=1500)
    assert process.returncode in (0, 1), process.stderr[-3000:]
    assert process.stdout, process.stderr[-3000:]
    controls_report: dict[str, Any] = json.loads(process.stdout)
    assert json.loads((folder / "out" / "controls.json").read_text()) == controls_report
    print(process.stdout)
    return controls_report


def test_every_control_was_trained_on_everything(report: dict[str, Any]) -> None:
    assert report["experiences"] == RUNS
    assert [control["name"] for control in report["controls"]] == ["true", "shuffled", "learning rate 0"]
    assert {control["trained"] for control in report["controls"]} == {RUNS}


def test_equal_weights_play_equally(report: dict[str, Any]) -> None:
    still = report["controls"][2]
    assert (still["gain"]["mean"], still["as_expected"]) == (0.0, True)


def test_the_true_reward_teaches_more_than_the_shuffled_one(report: dict[str, Any]) -> None:
    true, shuffled, _ = report["controls"]
    assert true["verdict"] == "better"
    assert true["gain"]["mean"] > shuffled["gain"]["mean"] + true["gain"]["standard_error"]


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
