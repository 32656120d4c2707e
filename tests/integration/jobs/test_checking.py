"""`headrace train --check` on a real tokenizer: bad rows are named by their number, the others are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_model

PROGRAM = "from headrace_cli.app import main; main()"
GOOD = {"prompt": "Who sent it?", "completion": "the agent"}
ROWS: list[Any] = [
    GOOD,
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 7},
    {"prompt": "empty", "completion": "  "},
    "no row",
    GOOD,
    {"prompt": "long", "completion": "word " * 3000},
    {"messages": [{"role": "assistant", "content": "b"}]},
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"prompt": "think", "completion": [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]},
    {"prompt": "better", "chosen": "x", "rejected": "y"},
]
BAD = {3: "empty", 4: "json", 5: "duplicate", 6: "too_long", 7: "order", 8: "held_out", 9: "template"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checking")
    tiny_model.build(root / "base", layers=1)
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "held_out.jsonl").write_text('{"question": "What is 2 + 2?"}\n')
    return root


def train(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "train", "reinforce++", "rows.jsonl", "--base", "base", *more]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.timeout(400)
@pytest.mark.long
def test_bad_rows_are_named_with_their_reasons(folder: Path) -> None:
    process = train(folder, "--check", "--json", "--held-out", "held_out.jsonl")
    assert process.returncode == 1, process.stderr
    report = json.loads(process.stdout)
    assert {refusal["row"]: refusal["kind"] for refusal in report["refusals"]} == BAD
    assert (report["rows"], report["kept"], report["experiences"], report["unread"]) == (10, 3, 4, {"id": 1})
    assert report["tokens_max"] == 2048
    assert not (folder / ".headrace" / "jobs").exists(), "looking leaves nothing"


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_preview_shows_what_is_trained_and_a_job_with_bad_rows_stops(folder: Path) -> None:
    process = train(folder, "--preview", "1", "--skip-bad", "7", "--held-out", "held_out.jsonl")
    assert process.returncode == 0, process.stderr
    assert "<|im_start|>assistant\n⟦the agent<|im_end|>⟧" in process.stdout
    process = train(folder, "--skip-bad", "5")
    assert process.returncode == 2
    assert "6 of 10 rows cannot be trained, but --skip-bad allows 5" in process.stderr
    assert "rows.jsonl, row 3: message 2 with role assistant is empty" in process.stderr
