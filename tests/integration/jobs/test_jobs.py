"""Tests of training jobs on rows of files, and that they change the weights as the rows require.

A job continues where its topic ends: interrupted at any record, it writes equal bytes in equal order, also if killed in
any part. `headrace train --check` names invalid rows by their number and counts the others.
transformers computes the logprobs of trained weights. The online stage of a recipe starts from the version before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.producing import Outgoing, producing
from headrace.topics import Range, connected
from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.filling import POSITION_HEADER, fill_topic
from headrace_operations.jobs.job import Job, JobJournal, PreparedJob, prepare
from headrace_operations.replay import copying
from headrace_runtime.registries import Registry
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience
from headrace_schemas.programs import WrittenBranch, WrittenSpan
from headrace_schemas.values.base import utcnow
from tests.jobs.program import (
    Workplace,
    case_of,
    differences,
    killed,
    manifests,
    moments,
    set_aside,
    to_the_end,
    written,
)
from tests.support import tiny_model
from tests.support.presence import draw_seed

ROWS, EPOCHS = 700, 2
Records = list[tuple[bytes | None, bytes | None, bytes | None]]
JOB = ("reinforce++", "rows.jsonl", "--base", "base")


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedJob:
    """Return the job in the state after its checks."""
    (tmp_path / "base").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    job = Job("reinforce++", tmp_path / "rows.jsonl", base=tmp_path / "base", data_dir=tmp_path / "data", epochs=EPOCHS)
    job_prepared = prepare(job, {})
    path = job_prepared.file_path(".rows")
    path.parent.mkdir(parents=True)
    branch = WrittenBranch(token_ids=(1, 2, 3), spans=(WrittenSpan(start=1, length=2, message=1),))
    rows = [CheckedRow(file="a" * 64, row=n + 1, prompt=f"{n:064x}", answers=((branch,),)) for n in range(ROWS)]
    path.write_bytes(b"".join(row.model_dump_json(exclude_none=True).encode() + b"\n" for row in rows))
    return job_prepared


def journal(prepared: PreparedJob) -> JobJournal:
    return JobJournal.begin(prepared, utcnow()).model_copy(update={"base": "m@0123456789abcdef"})


async def records(bus: str, topic: str) -> Records:
    async with connected(bus) as topics:
        all_records = [record async for record in topics.records(Range(topic))]
    return [
        (kafka_record.key, kafka_record.value, dict(kafka_record.headers).get(POSITION_HEADER))
        for kafka_record in all_records
    ]


async def filled(
    prepared: PreparedJob, bus: str, lineage: str, progress_journal: JobJournal, interruptions: int
) -> Records:
    await copying.ensure(bus, lineage)
    await copying.ensure(bus, lineage)  # whoever was killed after this does it again
    topic = f"replay-{lineage}-experiences"
    draw = random.Random(lineage)
    for _ in range(interruptions):
        work = asyncio.create_task(
            fill_topic(prepared, progress_journal, bus, topic, 0, lambda activity, count, total: None)
        )
        await asyncio.wait([work], timeout=draw.random())
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    assert (
        await fill_topic(prepared, progress_journal, bus, topic, 0, lambda activity, count, total: None)
        == ROWS * EPOCHS
    )
    return await records(bus, topic)


async def test_a_topic_that_was_interrupted_holds_the_same(prepared: PreparedJob, empty_bus: str) -> None:
    progress_journal = journal(prepared)
    uninterrupted = await filled(prepared, empty_bus, "whole", progress_journal, 0)
    assert [int(position or b"-1") for *_, position in uninterrupted] == list(range(ROWS * EPOCHS))
    assert len({Experience.from_json(value or b"").experience_id for _, value, _ in uninterrupted}) == ROWS * EPOCHS
    assert await filled(prepared, empty_bus, "parts", progress_journal, 6) == uninterrupted
    assert await filled(prepared, empty_bus, "whole", progress_journal, 0) == uninterrupted, (
        "what is full stays as it is"
    )


async def test_what_somebody_else_wrote_is_no_beginning(prepared: PreparedJob, empty_bus: str) -> None:
    progress_journal = journal(prepared)
    await copying.ensure(empty_bus, "foreign")
    async with producing(empty_bus) as producer:
        await producer.send([Outgoing("replay-foreign-experiences", b"k", b"{}", (), 0)])
    with pytest.raises(HeadraceError, match="does not contain the experiences of this job"):
        await filled(prepared, empty_bus, "foreign", progress_journal, 0)


PROGRAM = "from headrace_cli.app import main; main()"
GOOD = {"prompt": "Who sent it?", "completion": "the agent"}
MIXED_ROWS: list[Any] = [
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
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MIXED_ROWS))
    (root / "held_out.jsonl").write_text('{"question": "What is 2 + 2?"}\n')
    return root


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `headrace train ...` in `folder`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-c", PROGRAM, "train", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.timeout(400)
@pytest.mark.long
def test_bad_rows_are_named_with_their_reasons(folder: Path) -> None:
    process = train(folder, *JOB, "--check", "--json", "--held-out", "held_out.jsonl")
    assert process.returncode == 1, process.stderr
    report = json.loads(process.stdout)
    assert {refusal["row"]: refusal["kind"] for refusal in report["refusals"]} == BAD
    assert (report["rows"], report["kept"], report["experiences"], report["unread"]) == (10, 3, 4, {"id": 1})
    assert report["tokens_max"] == 2048
    assert not (folder / ".headrace" / "jobs").exists(), "looking leaves nothing"


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_preview_shows_what_is_trained_and_a_job_with_bad_rows_stops(folder: Path) -> None:
    process = train(folder, *JOB, "--preview", "1", "--skip-bad", "7", "--held-out", "held_out.jsonl")
    assert process.returncode == 0, process.stderr
    assert "<|im_start|>assistant\n⟦the agent<|im_end|>⟧" in process.stdout
    process = train(folder, *JOB, "--skip-bad", "5")
    assert process.returncode == 2
    assert "6 of 10 rows cannot be trained, but --skip-bad allows 5" in process.stderr
    assert "rows.jsonl, row 3: message 2 with role assistant is empty" in process.stderr


ANNOUNCED = Registry("algorithms", object, "algorithm").names()


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_a_killed_job_ends_with_the_same_bytes(tmp_path: Path) -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    case = case_of(300, seed)
    base, rows = tiny_model.build(tmp_path / "base", layers=1), written(case, tmp_path / "rows.jsonl")
    disturbed = Workplace(tmp_path / "work", base, rows)
    journal = to_the_end(case, disturbed)
    assert journal.trained == 300
    quiet = set_aside(disturbed, tmp_path / "quiet")
    log = killed(case, disturbed, moments(draw, 5, len(manifests(quiet))), draw)
    assert sum(kill["killed"] for kill in log) >= 4, log
    assert differences(quiet, disturbed) == [], log
    assert to_the_end(case, disturbed).version == journal.version, "a job that is done says so again"


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_a_planted_difference_is_noticed(tmp_path: Path) -> None:
    seed = 1
    case, other = case_of(70, seed), case_of(70, seed + 1)
    base = tiny_model.build(tmp_path / "base", layers=1)
    work = Workplace(tmp_path / "work", base, written(case, tmp_path / "rows.jsonl"))
    to_the_end(case, work)
    first = set_aside(work, tmp_path / "one")
    to_the_end(other, replace(work, rows=written(other, tmp_path / "others.jsonl")))
    assert any("version" in line for line in differences(first, work))


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


def run_training(folder: Path, *arguments: str) -> None:
    """Run `headrace train ...` in `folder`. Raises `AssertionError` with its output."""
    process = train(folder, *arguments, "--data-dir", "data")
    assert process.returncode == 0, f"status {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-3000:]}"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
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


SETTINGS = ("--set", "trainer.batch_experiences=16", "--set", "trainer.optimizer.learning_rate=0.002")
CHOSEN, REJECTED = "the agent reads it", "nobody answers"


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


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_demonstrations_become_likelier(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n}", "completion": CHOSEN} for n in range(32)]
    run_training(tmp_path, "sft", str(write_rows(tmp_path / "rows.jsonl", rows)), "--base", str(base), "--lineage", "l",
          "--epochs", "4", *SETTINGS)  # fmt: skip
    journal = Trained(tmp_path / "data", "l").journal
    assert (journal.trained, journal.dropped, journal.waiting) == (128, {}, 0)
    assert fmean(gain for (gain,) in gains(base, tmp_path, "l")) > 5


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_of_pairs_the_chosen_answer_gains_on_the_other(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n}", "chosen": CHOSEN, "rejected": REJECTED} for n in range(32)]
    run_training(tmp_path, "dpo", str(write_rows(tmp_path / "rows.jsonl", rows)), "--base", str(base), "--lineage", "l",
          "--epochs", "2", *SETTINGS)  # fmt: skip
    journal = Trained(tmp_path / "data", "l").journal
    assert (journal.trained, journal.dropped, journal.waiting) == (128, {}, 0)
    margins = [chosen - rejected for chosen, rejected in gains(base, tmp_path, "l")]
    assert min(margins) > 0
    assert fmean(margins) > 1


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_labels_move_good_and_bad_answers_apart(base: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Question {n}", "completion": (REJECTED, CHOSEN)[n % 2], "label": n % 2 == 1} for n in range(64)
    ]
    run_training(tmp_path, "kto", str(write_rows(tmp_path / "rows.jsonl", rows)), "--base", str(base), "--lineage", "l",
          "--epochs", "2", *SETTINGS)  # fmt: skip
    labels = [row.label for row in Trained(tmp_path / "data", "l").rows()]
    gains_of_labels = [gain for (gain,) in gains(base, tmp_path, "l")]
    good = fmean(gain for gain, label in zip(gains_of_labels, labels, strict=True) if label)
    bad = fmean(gain for gain, label in zip(gains_of_labels, labels, strict=True) if not label)
    assert good > bad + 1
    assert bad < 0


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_stages_follow_each_other(base: Path, tmp_path: Path) -> None:
    """An adapter is trained on demonstrations, then on pairs: the second stage starts with base and adapter merged."""
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"Question {n}", "completion": CHOSEN} for n in range(32)])
    pairs = [{"prompt": f"Question {n}", "chosen": CHOSEN, "rejected": REJECTED} for n in range(32)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    (tmp_path / "recipe.toml").write_text(
        f'lineage = "staged"\nbase = {json.dumps(str(base))}\n'
        "[settings.trainer]\nbatch_experiences = 16\noptimizer.learning_rate = 0.002\n"
        '[[stages]]\nalgorithm = "sft"\nsources = ["rows.jsonl"]\nepochs = 4\nsettings.trainer.lora.rank = 4\n'
        '[[stages]]\nalgorithm = "dpo"\nsources = ["pairs.jsonl"]\n'
    )
    run_training(tmp_path, "recipe.toml")
    first, second = (Trained(tmp_path / "data", f"staged-{number}") for number in (1, 2))
    between = tmp_path / "data" / "jobs" / "staged-1.version"
    branches = [branch for row in first.rows() for answer in row.answers for branch in answer]
    differences = [b - a for a, b in zip(logprob(base, branches), logprob(between, branches), strict=True)]
    assert fmean(differences) > 1, "what the adapter has learned is in the folder that the second stage begins with"
    assert second.journal.trained == 64
    assert (first.journal.kind, second.journal.kind) == ("sft", "dpo")
    margins = [chosen - rejected for chosen, rejected in gains(between, tmp_path, "staged-2")]
    assert min(margins) > 0
    run_training(tmp_path, "recipe.toml")
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


@pytest.mark.own_target
@pytest.mark.timeout(1800)
def test_a_program_teaches_what_demonstrations_have_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "s")
    monkeypatch.setenv("NAMED", "yes")
    base = tiny_model.build(tmp_path / "base", layers=1)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"Question {n}", "completion": "the agent"} for n in range(16)])
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "recipe.toml").write_text(
        f'lineage = "staged"\nbase = {json.dumps(str(base))}\n'
        '[settings]\ninference.torch.device = "cpu"\n'
        '[settings.trainer]\nmodel = "m"\nbatch_experiences = 8\ncompute.device = "cpu"\n'
        '[[stages]]\nalgorithm = "sft"\nsources = ["rows.jsonl"]\n'
        '[[stages]]\nalgorithm = "grpo"\nplay = ["{python}", "agent.py"]\nsteps = 2\nenvironment = ["NAMED"]\n'
        "settings.trainer.group_size = 2\nsettings.trainer.steps_per_version = 1\nsettings.trainer.max_staleness = 8\n"
    )
    run_training(tmp_path, "recipe.toml")
    first, second = (Trained(tmp_path / "data", f"staged-{number}").journal for number in (1, 2))
    assert first.kind == "sft"
    assert second.kind == "grpo"
    assert len(second.batches) >= 2
    assert second.trained >= 16
    assert second.version not in (None, second.base)
    run_training(tmp_path, "recipe.toml")
    assert Trained(tmp_path / "data", "staged-2").journal == second, "what is done is passed"
