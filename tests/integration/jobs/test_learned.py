"""Tests that training on rows of files changes the weights as the rows require, measured without the trainer's code.

`headrace train` runs to its end, and transformers computes the logprobs of its weights. The services of a recipe's
online stage start from the version of the stage before, and a program trains them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.job import JobJournal
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.programs import WrittenBranch
from tests.support import tiny_model

PROGRAM = "from headrace_cli.app import main; main()"
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Trained:
    """Result of a lineage in a data directory."""

    data_dir: Path
    lineage: str

    @property
    def journal(self) -> JobJournal:
        journal = JobJournal.read(self.data_dir / "jobs" / f"{self.lineage}.json")
        assert journal is not None
        return journal

    def rows(self) -> list[CheckedRow]:
        lines = (self.data_dir / "jobs" / f"{self.lineage}.rows").read_bytes().splitlines()
        return [CheckedRow.model_validate_json(line) for line in lines]

    def weights(self, folder: Path) -> Path:
        """Write the last version to `folder`."""
        manifest = self.journal.manifest
        assert manifest is not None
        blobs = BlobStore((self.data_dir / "blobs").as_uri())
        return versions.fetch_version(blobs, versions.read_manifest(blobs, manifest), folder)


def train(folder: Path, *arguments: str) -> None:
    """Run `headrace train ...` in `folder`. Raises `AssertionError` with its output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-c", PROGRAM, "train", *arguments, "--data-dir", "data"]
    process = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert process.returncode == 0, f"status {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-3000:]}"


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def logprob(folder: Path, branches: Sequence[WrittenBranch]) -> list[float]:
    """Return the mean logprob of each branch's trained tokens in nats, computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    means = []
    with torch.no_grad():
        for branch in branches:
            ids = torch.tensor([list(branch.token_ids)])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            positions = [at for span in branch.spans for at in range(span.start, span.start + span.length)]
            means.append(float(sum(logprobs[at - 1, ids[0, at]] for at in positions)))
    return means


pytestmark = [pytest.mark.own_target, pytest.mark.timeout(1800)]
SETTINGS = ("--set", "trainer.batch_experiences=16", "--set", "trainer.optimizer.learning_rate=0.002")
GOOD, BAD = "the agent reads it", "nobody answers"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("learned") / "base", layers=1)


def gains(base: Path, tmp_path: Path, lineage: str) -> list[tuple[float, ...]]:
    """Return the gains in logprob of the answers of each row, in nats."""
    trained = Trained(tmp_path / "data", lineage)
    folder = trained.weights(tmp_path / "after")
    rows = trained.rows()
    branches = [branch for row in rows for answer in row.answers for branch in answer]
    before, after = logprob(base, branches), logprob(folder, branches)
    each = iter([b - a for a, b in zip(before, after, strict=True)])
    return [tuple(next(each) for answer in row.answers for _ in answer) for row in rows]


def test_demonstrations_become_likelier(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n}", "completion": GOOD} for n in range(32)]
    train(tmp_path, "sft", str(written(tmp_path / "rows.jsonl", rows)), "--base", str(base), "--lineage", "l",
          "--epochs", "4", *SETTINGS)  # fmt: skip
    journal = Trained(tmp_path / "data", "l").journal
    assert (journal.trained, journal.dropped, journal.waiting) == (128, {}, 0)
    assert fmean(gain for (gain,) in gains(base, tmp_path, "l")) > 5


def test_of_pairs_the_chosen_answer_gains_on_the_other(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n}", "chosen": GOOD, "rejected": BAD} for n in range(32)]
    train(tmp_path, "dpo", str(written(tmp_path / "rows.jsonl", rows)), "--base", str(base), "--lineage", "l",
          "--epochs", "2", *SETTINGS)  # fmt: skip
    journal = Trained(tmp_path / "data", "l").journal
    assert (journal.trained, journal.dropped, journal.waiting) == (128, {}, 0)
    margins = [chosen - rejected for chosen, rejected in gains(base, tmp_path, "l")]
    assert min(margins) > 0
    assert fmean(margins) > 1


def test_labels_move_good_and_bad_answers_apart(base: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Question {n}", "completion": (BAD, GOOD)[n % 2], "label": n % 2 == 1} for n in range(64)
    ]
    train(tmp_path, "kto", str(written(tmp_path / "rows.jsonl", rows)), "--base", str(base), "--lineage", "l",
          "--epochs", "2", *SETTINGS)  # fmt: skip
    labels = [row.label for row in Trained(tmp_path / "data", "l").rows()]
    gains_of_labels = [gain for (gain,) in gains(base, tmp_path, "l")]
    good = fmean(gain for gain, label in zip(gains_of_labels, labels, strict=True) if label)
    bad = fmean(gain for gain, label in zip(gains_of_labels, labels, strict=True) if not label)
    assert good > bad + 1
    assert bad < 0


def test_stages_follow_each_other(base: Path, tmp_path: Path) -> None:
    """An adapter is trained on demonstrations, then on pairs: the second stage starts with base and adapter merged."""
    written(tmp_path / "rows.jsonl", [{"prompt": f"Question {n}", "completion": GOOD} for n in range(32)])
    pairs = [{"prompt": f"Question {n}", "chosen": GOOD, "rejected": BAD} for n in range(32)]
    written(tmp_path / "pairs.jsonl", pairs)
    (tmp_path / "recipe.toml").write_text(
        f'lineage = "staged"\nbase = {json.dumps(str(base))}\n'
        "[settings.trainer]\nbatch_experiences = 16\noptimizer.learning_rate = 0.002\n"
        '[[stages]]\nalgorithm = "sft"\nsources = ["rows.jsonl"]\nepochs = 4\nsettings.trainer.lora.rank = 4\n'
        '[[stages]]\nalgorithm = "dpo"\nsources = ["pairs.jsonl"]\n'
    )
    train(tmp_path, "recipe.toml")
    first, second = (Trained(tmp_path / "data", f"staged-{number}") for number in (1, 2))
    between = tmp_path / "data" / "jobs" / "staged-1.version"
    branches = [branch for row in first.rows() for answer in row.answers for branch in answer]
    differences = [b - a for a, b in zip(logprob(base, branches), logprob(between, branches), strict=True)]
    assert fmean(differences) > 1, "what the adapter has learned is in the folder that the second stage begins with"
    assert second.journal.trained == 64
    assert (first.journal.kind, second.journal.kind) == ("sft", "dpo")
    margins = [chosen - rejected for chosen, rejected in gains(between, tmp_path, "staged-2")]
    assert min(margins) > 0
    train(tmp_path, "recipe.toml")
    assert Trained(tmp_path / "data", "staged-2").journal == second.journal, "what is done is passed"


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
        '[settings]\ninference.torch.device = "cpu"\n'
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
