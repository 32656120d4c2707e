"""Tests of a job: its digest, the checks before its start, the reason for each invalid row, and its experiences."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace_operations.jobs.checking import CheckedRow, HeldOutTasks
from headrace_operations.jobs.checks import DuplicateDetector, check
from headrace_operations.jobs.filling import experiences, row_order
from headrace_operations.jobs.formats import RowReader
from headrace_operations.jobs.from_topics import replay_request, source_topic
from headrace_operations.jobs.job import Job, JobJournal, RowOptions, lock_job, prepare
from headrace_operations.jobs.recipe import flatten_settings, read
from headrace_operations.jobs.sources import BadRow, DataRow
from headrace_schemas import Experience
from headrace_schemas.programs import WrittenBranch, WrittenSpan
from headrace_schemas.values.base import utcnow

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


def test_the_digest_of_a_job_ignores_file_locations(tmp_path: Path, base: Path) -> None:
    prepared = prepare(job(tmp_path, base), {})
    moved_base = base.rename(tmp_path / "moved")
    (moved_base / "model.safetensors").write_text("other weights: the trainer compares them itself")
    moved_job = prepare(job(tmp_path, moved_base, source=rows(tmp_path, "elsewhere.jsonl")), {})
    assert moved_job.digest == prepared.digest
    assert prepared.lineage == f"reinforce-rows-{prepared.digest[:8]}"


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
def test_the_digest_of_a_job_covers_its_options(tmp_path: Path, base: Path, change: dict[str, Any]) -> None:
    assert prepare(job(tmp_path, base, **change), {}).digest != prepare(job(tmp_path, base), {}).digest


def test_the_digest_of_a_job_covers_rows_and_template(tmp_path: Path, base: Path) -> None:
    digest = prepare(job(tmp_path, base), {}).digest
    assert prepare(job(tmp_path, base, source=rows(tmp_path, "more.jsonl", "{}\n{}\n")), {}).digest != digest
    (base / "chat_template.jinja").write_text("x")
    assert prepare(job(tmp_path, base), {}).digest != digest


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


def test_a_missing_base_and_an_unknown_algorithm_are_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(UsageError, match=r"trainer\.base is not set: name a folder or a model of the hub with --base"):
        prepare(Job("grpo", rows(tmp_path)), {})
    with pytest.raises(UsageError, match="is not a folder"):
        prepare(Job("grpo", rows(tmp_path), base=tmp_path / "none"), {})
    with pytest.raises(UsageError, match="the algorithm 'gpro'; did you mean"):
        prepare(Job("gpro", rows(tmp_path), base=base), {})


def test_the_programs_get_the_jobs_settings(tmp_path: Path, base: Path) -> None:
    overrides = prepare(job(tmp_path, base, settings={"trainer.model": "m"}), {}).overrides
    assert overrides.get("trainer.algorithm") == "reinforce++"
    assert overrides.get("trainer.base") == str(base)
    assert overrides.get("trainer.batch_experiences_min") == 1, "an incomplete batch is trained as well"
    assert overrides.get("trainer.model") == "m"


def test_a_lineage_name_belongs_to_one_job_once_it_has_a_base(tmp_path: Path, base: Path) -> None:
    first = prepare(job(tmp_path, base, lineage="taught"), {})
    path = first.file_path(".json")
    journal = JobJournal.begin(first, NOW)
    assert JobJournal.begin(first, utcnow()) == journal, "the same job resumes"
    other_job = prepare(job(tmp_path, base, lineage="taught", epochs=2), {})
    assert JobJournal.begin(other_job, NOW).digest == other_job.digest, (
        "the first job has no lineage yet, so a corrected job may use the name"
    )
    journal = JobJournal.begin(first, NOW).record(path, base="m@0123456789abcdef")
    assert JobJournal.read(path) == journal
    with pytest.raises(UsageError, match=r"lineage = 'taught': belongs to a job with other rows.*--lineage"):
        JobJournal.begin(other_job, NOW)


def test_one_process_works_on_a_job(tmp_path: Path, base: Path) -> None:
    prepared = prepare(job(tmp_path, base), {})
    with lock_job(prepared), pytest.raises(UsageError, match="another process works on it in"), lock_job(prepared):
        pytest.fail("two processes have the lock")
    with lock_job(prepared):
        pass


def test_a_topic_must_be_the_only_source(tmp_path: Path, base: Path) -> None:
    from headrace.topics import Range

    assert source_topic(["rows.jsonl", "more"]) is None
    assert source_topic(["topic:experiences"]) == "experiences"
    with pytest.raises(UsageError, match="must be the only source"):
        source_topic(["topic:experiences", "rows.jsonl"])
    with pytest.raises(UsageError, match="topic:turns: topics that can be trained on are experiences and trajectories"):
        source_topic(["topic:turns"])
    with pytest.raises(UsageError, match="name the new lineage with --lineage"):
        replay_request("grpo", Range("experiences"), Job("grpo", []))
    topic_job = Job("grpo", [], base=base, lineage="again", bus="bus:1", settings={"trainer.group_size": 4})
    request = replay_request("grpo", Range("experiences"), topic_job)
    assert (request.cut, request.bus, request.overrides.get("trainer.algorithm")) == ("rules", "bus:1", "grpo")
    assert request.overrides.get("trainer.group_size") == 4


def test_a_recipe_is_read_with_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    stage = '[[stages]]\nalgorithm = "grpo"\n'
    path.write_text(f'lineage = "s"\n{stage}sources = ["a.jsonl"]\nsettings.trainer.lora.rank = 8\n')
    recipe = read(path)
    assert flatten_settings(recipe.stages[0].settings) == {"trainer.lora.rank": 8}
    assert recipe.folder == tmp_path
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


def test_a_journal_without_optional_fields_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    path.write_text(json.dumps({"digest": "a" * 64, "kind": "sft", "model": "m", "begun": NOW.isoformat()}))
    assert JobJournal.read(path) is not None


READER = RowReader({})
CALL = {"role": "assistant", "tool_calls": [{"name": "search", "arguments": {}}]}
USER, ANSWER, RESULT = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "tool", "content": ""},
)
SYSTEM = {"role": "system", "content": "be kind"}


def chat(*messages: dict[str, Any]) -> DataRow:
    return READER.read({"messages": [dict(message) for message in messages]})


def kind_of(row: DataRow) -> str | None:
    try:
        check(row)
    except BadRow as error:
        return error.kind
    return None


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ANSWER],
        [SYSTEM, USER, ANSWER],
        [USER, USER, ANSWER],
        [USER, CALL, RESULT, ANSWER],
        [USER, CALL, RESULT, RESULT, CALL, RESULT, ANSWER],
        [USER, CALL],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "so"}],
    ],
)
def test_valid_conversations_are_accepted(messages: list[dict[str, Any]]) -> None:
    assert kind_of(chat(*messages)) is None


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([ANSWER], "order"),
        ([SYSTEM, ANSWER], "order"),
        ([USER, ANSWER, ANSWER], "order"),
        ([USER, SYSTEM, ANSWER], "order"),
        ([USER, ANSWER, USER], "order"),
        ([USER, RESULT, ANSWER], "order"),
        ([USER, ANSWER, RESULT, ANSWER], "order"),
        ([USER, CALL, USER, ANSWER], "order"),
        ([{**USER, "content": " \n"}, ANSWER], "empty"),
        ([USER, {**ANSWER, "content": ""}], "empty"),
        ([USER, {**ANSWER, "content": " "}], "empty"),
        ([USER, {**ANSWER, "weight": 0}], "empty"),
    ],
)
def test_invalid_conversations_are_refused_with_a_kind(messages: list[dict[str, Any]], kind: str) -> None:
    assert kind_of(chat(*messages)) == kind


def test_answers_of_a_preference_must_differ_and_be_single_messages() -> None:
    assert kind_of(READER.read({"prompt": "p", "chosen": "a", "rejected": "b"})) is None
    assert kind_of(READER.read({"prompt": "p", "chosen": "a", "rejected": "a"})) == "equal"
    longer = [dict(ANSWER), dict(USER), {**ANSWER, "content": "bye"}]
    assert kind_of(READER.read({"prompt": "p", "chosen": longer, "rejected": "b"})) == "order"


def refused(detector: DuplicateDetector, record: dict[str, Any], location: str) -> tuple[str, str] | None:
    try:
        detector.check(READER.read(record), location)
    except BadRow as error:
        return error.kind, str(error)
    return None


def test_duplicates_and_contradictions_name_the_earlier_row() -> None:
    detector = DuplicateDetector(allowed=False)
    assert refused(detector, {"prompt": "p", "completion": "c"}, "row 1") is None
    assert refused(detector, {"prompt": "p", "completion": "d"}, "row 2") is None
    kind, reason = refused(detector, {"question": "p", "answer": "c"}, "row 3") or ("", "")
    assert kind == "duplicate"
    assert reason.startswith("row 1 is identical")
    assert refused(detector, {"prompt": "p", "chosen": "a", "rejected": "b"}, "row 4") is None
    assert refused(detector, {"prompt": "p", "chosen": "b", "rejected": "a"}, "row 5") == (
        "contradiction",
        "row 4 prefers the other answer",
    )
    assert refused(detector, {"prompt": "q", "completion": "c", "label": True}, "row 6") is None
    assert refused(detector, {"prompt": "q", "completion": "c", "label": False}, "row 7") == (
        "contradiction",
        "row 6 labels the same answer as good",
    )


def test_duplicates_can_be_allowed_but_contradictions_cannot() -> None:
    detector = DuplicateDetector(allowed=True)
    for location in ("row 1", "row 2"):
        assert refused(detector, {"prompt": "p", "completion": "c", "label": True}, location) is None
    assert (refused(detector, {"prompt": "p", "completion": "c", "label": False}, "row 3") or ("",))[
        0
    ] == "contradiction"


LONG = "Anna has 12 apples and gives 5 of them to Ben. How many apples does she have left in the end?"
HELD_OUT = HeldOutTasks({"apples": LONG, "short": "What is 2 + 2?", "word": "Hello!"})


@pytest.mark.parametrize(
    ("prompt", "leaks"),
    [
        (LONG, True),
        (LONG.upper().replace(",", " "), True),
        (f"Solve step by step. {LONG} Think first.", True),
        ("Anna has 12 apples and gives 5 of them to Ben. How many apples does Ben have?", True),
        ("Anna has 12 pears. How many does she have?", False),
        ("what is 2+2", True),
        ("Tell me: what is 2 + 2?", True),
        ("What is 3 + 3?", False),
        ("hello", True),
        ("hello there", False),
    ],
)
def test_held_out_tasks_leak_as_a_whole_or_in_shingles(prompt: str, leaks: bool) -> None:
    row = READER.read({"prompt": prompt, "completion": "x"})
    if leaks:
        with pytest.raises(BadRow, match="held-out task") as caught:
            HELD_OUT.check(row)
        assert caught.value.kind == "held_out"
    else:
        HELD_OUT.check(row)


def test_assistant_messages_do_not_leak_tasks() -> None:
    HELD_OUT.check(READER.read({"prompt": "x", "completion": LONG}))


TIME = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "m@0123456789abcdef"
SHORT_BRANCH = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=1),))
LONG_BRANCH = WrittenBranch(
    token_ids=(5, 6, 7, 8, 9, 4),
    spans=(WrittenSpan(start=1, length=2, message=1), WrittenSpan(start=4, length=2, message=3)),
)
LATER_BRANCH = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=5),))


def row(*answers: tuple[WrittenBranch, ...], number: int = 3, **fields: Any) -> CheckedRow:
    return CheckedRow(file="a" * 64, row=number, prompt="b" * 64, answers=answers, **fields)


def build_experiences(checked_row: CheckedRow, epoch: int = 0) -> list[Experience]:
    return list(experiences(checked_row, epoch, model="m", version=VERSION, time=TIME))


def test_an_answer_becomes_a_written_experience() -> None:
    (experience,) = build_experiences(row((LONG_BRANCH,)))
    assert (experience.origin, experience.reward, experience.no_reward) == ("written", None, "no_reward")
    assert (experience.weight, experience.preferences) == (1.0, ())
    assert experience.branch is not None
    assert experience.branch.loss_mask == (0, 1, 1, 0, 1, 1)
    assert {span.version for span in experience.branch.spans} == {VERSION}
    assert all(set(span.logprobs) == {0.0} for span in experience.branch.spans)
    assert len(set(experience.turn_ids)) == 2
    assert Experience.from_json(experience.to_json()) == experience


def test_a_row_without_reward_and_label_has_no_reward() -> None:
    assert build_experiences(row((SHORT_BRANCH,), reward=-0.5))[0].reward == -0.5
    assert [build_experiences(row((SHORT_BRANCH,), label=label))[0].reward for label in (True, False)] == [1.0, 0.0]
    for experience in build_experiences(row((SHORT_BRANCH,), (LONG_BRANCH,))):
        assert (experience.reward, experience.no_reward) == (None, "no_reward"), (
            "an answer of a preference has no reward"
        )


def test_the_answers_of_a_preference_share_its_id() -> None:
    chosen, rejected = build_experiences(
        row((SHORT_BRANCH,), (SHORT_BRANCH.model_copy(update={"token_ids": (5, 6, 7, 9)}),))
    )
    (chosen_side,), (rejected_side,) = chosen.preferences, rejected.preferences
    assert (chosen_side.side, rejected_side.side) == ("chosen", "rejected")
    assert chosen_side.preference_id == rejected_side.preference_id
    assert (chosen_side.turn_id, rejected_side.turn_id) == (chosen.turn_ids[0], rejected.turn_ids[0])
    assert chosen.experience_id != rejected.experience_id


def test_the_branches_of_an_answer_share_its_weight() -> None:
    branches = build_experiences(row((SHORT_BRANCH, LONG_BRANCH)))
    assert [experience.weight for experience in branches] == [0.5, 0.5]
    assert [experience.branch_index for experience in branches] == [0, 1]
    assert len({experience.trajectory_id for experience in branches}) == 1


def test_ids_are_reproducible_and_unique() -> None:
    rows = [
        row((SHORT_BRANCH,)),
        row((SHORT_BRANCH,), number=4),
        row((SHORT_BRANCH,), (LONG_BRANCH,), number=5),
        row((SHORT_BRANCH, LATER_BRANCH), number=6),
    ]
    all_experiences = [
        experience for epoch in range(3) for checked_row in rows for experience in build_experiences(checked_row, epoch)
    ]
    assert [
        experience.to_json()
        for epoch in range(3)
        for checked_row in rows
        for experience in build_experiences(checked_row, epoch)
    ] == [experience.to_json() for experience in all_experiences]
    assert len({experience.experience_id for experience in all_experiences}) == len(all_experiences)
    assert len({turn for experience in all_experiences for turn in experience.turn_ids}) == sum(
        len(experience.turn_ids) for experience in all_experiences
    )
    other_file = build_experiences(row((SHORT_BRANCH,)).model_copy(update={"file": "c" * 64}))
    assert other_file[0].experience_id not in {experience.experience_id for experience in all_experiences}, (
        "the digest of the file is part of the ids"
    )


def test_each_epoch_has_a_reproducible_order() -> None:
    assert row_order(50, 0, 7, shuffle=False) == list(range(50))
    orders = [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(50))] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert row_order(50, 0, 8, shuffle=True) != orders[0]
