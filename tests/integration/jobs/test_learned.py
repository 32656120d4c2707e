"""Training on rows of files moves the weights as the rows require, measured without code of our trainer."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.integration.jobs.learned import Trained, logprob, train, written
from tests.support import tiny_model

pytestmark = [pytest.mark.own_target, pytest.mark.timeout(1800)]
SETTINGS = ("--set", "trainer.batch_experiences=16", "--set", "trainer.optimizer.learning_rate=0.002")
GOOD, BAD = "the agent reads it", "nobody answers"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("learned") / "base", layers=1)


def gains(base: Path, tmp_path: Path, lineage: str) -> list[tuple[float, ...]]:
    """Return for each row the gains in logprob of its answers, in nats."""
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
    """Demonstrations by an adapter, then pairs: the second stage begins with base and adapter as one model."""
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
