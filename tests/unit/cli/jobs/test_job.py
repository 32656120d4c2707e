"""What makes two jobs the same, and what is refused before anything is started."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace_operations.jobs.from_topics import replay_request, source_topic
from headrace_operations.jobs.job import Job, RowOptions, prepare
from headrace_operations.jobs.journal import JobJournal, lock_job
from headrace_operations.jobs.recipe import flatten_settings, read
from headrace_schemas.base import utcnow

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(name)
    return folder


def rows(tmp_path: Path, name: str = "rows.jsonl", text: str = "{}\n") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def job(tmp_path: Path, base: Path, **options: Any) -> Job:
    return Job("reinforce++", options.pop("source", rows(tmp_path)), base=base, data_dir=tmp_path / "data", **options)


def test_where_things_lie_does_not_make_another_job(tmp_path: Path, base: Path) -> None:
    one = prepare(job(tmp_path, base), {})
    moved = base.rename(tmp_path / "moved")
    (moved / "model.safetensors").write_text("other weights: the trainer compares them itself")
    again = prepare(job(tmp_path, moved, source=rows(tmp_path, "elsewhere.jsonl")), {})
    assert again.digest == one.digest
    assert one.lineage == f"reinforce-rows-{one.digest[:8]}"


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 2},
        {"seed": 1},
        {"shuffle": False},
        {"settings": {"trainer.lora.rank": 4}},
        {"settings": {"inference.tool_parser": "none"}},
        {"rows": RowOptions(columns={"prompt": "q"})},
        {"rows": RowOptions(skip_bad=1)},
        {"rows": RowOptions(keep_duplicates=True)},
    ],
)
def test_what_decides_the_outcome_makes_another_job(tmp_path: Path, base: Path, change: dict[str, Any]) -> None:
    assert prepare(job(tmp_path, base, **change), {}).digest != prepare(job(tmp_path, base), {}).digest


def test_other_rows_or_another_template_make_another_job(tmp_path: Path, base: Path) -> None:
    one = prepare(job(tmp_path, base), {}).digest
    assert prepare(job(tmp_path, base, source=rows(tmp_path, "more.jsonl", "{}\n{}\n")), {}).digest != one
    (base / "chat_template.jinja").write_text("x")
    assert prepare(job(tmp_path, base), {}).digest != one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lineage": "main"}, "is the live lineage"),
        ({"lineage": "a/b"}, "must have 1 to 100 letters, digits"),
        ({"epochs": 0}, "epochs = 0: must be at least 1"),
        ({"source": "missing.jsonl"}, r"missing\.jsonl: does not exist"),
    ],
)
def test_refusals_name_the_remedy(tmp_path: Path, base: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(job(tmp_path, base, **change), {})


def test_a_missing_base_and_an_unknown_algorithm_are_said(tmp_path: Path, base: Path) -> None:
    with pytest.raises(UsageError, match=r"trainer\.base is not set: name a Hugging Face folder with --base"):
        prepare(Job("grpo", rows(tmp_path)), {})
    with pytest.raises(UsageError, match="is not a folder"):
        prepare(Job("grpo", rows(tmp_path), base=tmp_path / "none"), {})
    with pytest.raises(UsageError, match="the algorithm 'gpro'; did you mean"):
        prepare(Job("gpro", rows(tmp_path), base=base), {})


def test_the_programs_get_the_jobs_settings(tmp_path: Path, base: Path) -> None:
    found = prepare(job(tmp_path, base, settings={"trainer.model": "m"}), {}).overrides
    assert found.get("trainer.algorithm") == "reinforce++"
    assert found.get("trainer.base") == str(base)
    assert found.get("trainer.batch_experiences_min") == 1, "no row is left over for being one of few"
    assert found.get("trainer.model") == "m"


def test_a_name_belongs_to_one_job_once_something_came_of_it(tmp_path: Path, base: Path) -> None:
    first = prepare(job(tmp_path, base, lineage="taught"), {})
    path = first.file_path(".json")
    journal = JobJournal.begin(first, NOW)
    assert JobJournal.begin(first, utcnow()) == journal, "the same job goes on"
    other = prepare(job(tmp_path, base, lineage="taught", epochs=2), {})
    assert JobJournal.begin(other, NOW).digest == other.digest, (
        "nothing has come of the first one: a mended file may try"
    )
    journal = JobJournal.begin(first, NOW).record(path, base="m@0123456789abcdef")
    assert JobJournal.read(path) == journal
    with pytest.raises(UsageError, match=r"lineage = 'taught': belongs to a job with other rows.*--lineage"):
        JobJournal.begin(other, NOW)


def test_one_process_works_on_a_job(tmp_path: Path, base: Path) -> None:
    prepared = prepare(job(tmp_path, base), {})
    with lock_job(prepared), pytest.raises(UsageError, match="another process works on it in"), lock_job(prepared):
        pytest.fail("two at once")
    with lock_job(prepared):
        pass


def test_topics_are_sources_of_their_own(tmp_path: Path, base: Path) -> None:
    from headrace.topics import Range

    assert source_topic(["rows.jsonl", "more"]) is None
    assert source_topic(["topic:experiences"]) == "experiences"
    with pytest.raises(UsageError, match="must be the only source"):
        source_topic(["topic:experiences", "rows.jsonl"])
    with pytest.raises(UsageError, match="topic:turns: topics that can be trained on are experiences and trajectories"):
        source_topic(["topic:turns"])
    with pytest.raises(UsageError, match="name the new lineage with --lineage"):
        replay_request("grpo", Range("experiences"), Job("grpo", []))
    asked = Job("grpo", [], base=base, lineage="again", bus="bus:1", settings={"trainer.group_size": 4})
    made = replay_request("grpo", Range("experiences"), asked)
    assert (made.cut, made.bus, made.overrides.get("trainer.algorithm")) == ("rules", "bus:1", "grpo")
    assert made.overrides.get("trainer.group_size") == 4


def test_a_recipe_says_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    stage = '[[stages]]\nalgorithm = "grpo"\n'
    path.write_text(f'lineage = "s"\n{stage}sources = ["a.jsonl"]\nsettings.trainer.lora.rank = 8\n')
    found = read(path)
    assert flatten_settings(found.stages[0].settings) == {"trainer.lora.rank": 8}
    assert found.folder == tmp_path
    for text, message in (
        (f'lineage = "s"\n{stage}', "a stage has either sources or play"),
        (f'lineage = "s"\n{stage}sources = ["a"]\nplay = ["b"]', "a stage has either sources or play"),
        (f'lineage = "s"\n{stage}sources = ["a"]\nepoch = 2', "stages.0.epoch: Extra inputs"),
        ('lineage = "s"', "stages: Field required"),
        ("lineage", "recipe.toml is not valid TOML: Expected"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read(path)


def test_a_journal_of_a_newer_release_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    path.write_text(json.dumps({"digest": "a" * 64, "kind": "sft", "model": "m", "begun": NOW.isoformat()}))
    assert JobJournal.read(path) is not None
