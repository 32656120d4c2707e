"""Online stage of a recipe: its own services start from the version of the stage before; a program trains them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.jobs.learned import Trained, train, written
from tests.support import tiny_model

pytestmark = [pytest.mark.own_target, pytest.mark.timeout(1800)]
AGENT = """
import os
from headrace import Client
from openai import OpenAI

assert not [name for name in os.environ if name.startswith("HEADRACE_") or name == "PLANTED_SECRET"]
assert os.environ["NAMED"] == "yes"
with Client(os.environ["OPENAI_BASE_URL"].removesuffix("/v1")) as client:
    number = 0
    while True:
        number += 1
        for run in range(2):
            with client.session(task_id=f"t{number}", run_id=f"{number}-{run}") as session:
                llm = OpenAI(base_url=session.base_url, api_key="none")
                question = [{"role": "user", "content": f"Question {number}"}]
                llm.chat.completions.create(model="m", messages=question, max_tokens=6)
                session.feedback(float(run))
"""


def test_a_program_teaches_what_demonstrations_have_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "s")
    monkeypatch.setenv("NAMED", "yes")
    base = tiny_model.build(tmp_path / "base", layers=1)
    written(tmp_path / "rows.jsonl", [{"prompt": f"Question {n}", "completion": "the agent"} for n in range(16)])
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "recipe.toml").write_text(
        f'lineage = "staged"\nbase = {json.dumps(str(base))}\n'
        '[settings]\ninference.torch.device = "cpu"\ninference.heartbeat_s = 0.5\n'
        '[settings.trainer]\nmodel = "m"\nbatch_experiences = 8\ncompute.device = "cpu"\n'
        '[[stages]]\nalgorithm = "sft"\nsources = ["rows.jsonl"]\n'
        '[[stages]]\nalgorithm = "grpo"\nplay = ["{python}", "agent.py"]\nsteps = 2\nenvironment = ["NAMED"]\n'
        "settings.trainer.group_size = 2\nsettings.trainer.steps_per_version = 1\nsettings.trainer.max_staleness = 8\n"
    )
    train(tmp_path, "recipe.toml")
    first, second = (Trained(tmp_path / "data", f"staged-{number}").journal for number in (1, 2))
    assert first.kind == "sft"
    assert second.kind == "grpo"
    assert len(second.batches) >= 2
    assert second.trained >= 16
    assert second.version not in (None, second.base)
    train(tmp_path, "recipe.toml")
    assert Trained(tmp_path / "data", "staged-2").journal == second, "what is done is passed"
