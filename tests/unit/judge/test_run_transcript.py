"""Transcripts keep roles separate, and contain a note for all text that they leave out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import headrace_schemas
from headrace_judge.prompts import Prompts
from headrace_judge.rubric import Rubric, load
from headrace_judge.run_transcript import TranscriptEntry, transcript_of
from headrace_schemas import Dialogue, Trajectory
from tests.support.judge_rig import said, trajectory

EXAMPLE = Path(headrace_schemas.__file__).parent / "examples" / "trajectories" / "two-turns.json"
RUBRIC = load("helpfulness")


def rubric(**changes: object) -> Rubric:
    return Rubric.model_validate(RUBRIC.model_dump() | changes)


def entries_of(run: Trajectory, rubric_shown: Rubric = RUBRIC) -> list[tuple[str, str, str]]:
    transcript = transcript_of(run, rubric_shown)
    assert transcript is not None
    return [(entry.kind, entry.name, entry.text) for entry in transcript.entries]


def test_a_run_is_told_in_order_with_who_said_what() -> None:
    run = Trajectory.from_json(EXAMPLE.read_bytes())
    assert entries_of(run) == [
        ("question", "", "Who sent the invoice?"),
        ("tool_call", "search_mail", '{"query": "invoice"}'),
        ("tool_result", "search_mail", "1 hit: from Ada"),
        ("answer", "", "Ada"),
    ]


def test_the_rubric_chooses_the_parts() -> None:
    run = Trajectory.from_json(EXAMPLE.read_bytes())
    everything = rubric(show=["tools", "instructions", "answer"], context=["expected", "missing"])
    assert entries_of(run, everything) == [
        ("context", "expected", "Ada"),
        ("tool", "search_mail", "Full-text search in the mailbox."),
        ("instructions", "", "You answer questions about a mailbox."),
        ("answer", "", "Ada"),
    ]


def test_without_anything_of_the_models_there_is_nothing_to_judge() -> None:
    assert transcript_of(trajectory("t", messages=said(("user", "Hello?"), ("assistant", ""))), RUBRIC) is None
    assert transcript_of(trajectory("t", dialogues=()), RUBRIC) is None
    silent = trajectory("t", messages=said(("user", "Hi"), ("assistant", "thinking"), ("user", "?"), ("assistant", "")))
    assert transcript_of(silent, rubric(show=["question", "answer"])) is None
    assert transcript_of(silent, RUBRIC) is not None


def test_the_middle_of_a_long_entry_is_left_out_and_counted() -> None:
    text = "".join(str(n % 10) for n in range(1000))
    transcript = transcript_of(trajectory("t", answer=text), rubric(run_chars_max=1000, part_chars_max=100))
    assert transcript is not None
    assert transcript.shortened
    assert transcript.entries[-1].text == f"{text[:50]}\n[... 900 characters left out ...]\n{text[-50:]}"


def test_the_middle_of_a_long_run_is_left_out_and_counted() -> None:
    turns = [("user" if n % 2 == 0 else "assistant", f"{n:03} {'x' * 96}") for n in range(40)]
    entries = entries_of(trajectory("t", messages=said(*turns)), rubric(run_chars_max=1000, part_chars_max=250))
    assert [text[:3] for kind, _, text in entries if kind != "note"] == [f"{n:03}" for n in [*range(5), *range(35, 40)]]
    assert entries[5] == ("note", "", "30 entries with 3000 characters were left out here.")
    assert entries[-1][0] == "answer"


def test_nothing_is_ever_left_out_silently() -> None:
    """In random runs, the shown text fits, and shown and counted characters add up to the whole run."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(200):
        limit = generator.choice([1000, 2000])
        rubric_shown = rubric(run_chars_max=limit, part_chars_max=limit // generator.choice([4, 8]))
        texts = ["y" * generator.randint(1, 600) for _ in range(generator.randint(1, 30))]
        transcript = transcript_of(
            trajectory("t", messages=said(("user", "q"), *(("assistant", text) for text in texts))), rubric_shown
        )
        assert transcript is not None
        notes = [entry for entry in transcript.entries if entry.kind == "note"]
        missing = sum(int(note.text.split()[0]) for note in notes)
        assert len(transcript.entries) - len(notes) + missing == len(texts) + 1
        assert sum(len(entry.text) for entry in transcript.entries if entry.kind != "note") <= limit
        assert transcript.shortened == (bool(notes) or any("left out" in entry.text for entry in transcript.entries))
        assert (transcript.entries[0].kind, transcript.entries[-1].kind) == ("question", "answer")


def test_other_branches_are_mentioned() -> None:
    run = trajectory("t")
    forked = run.model_copy(
        update={
            "branches": run.branches * 2,
            "dialogues": (Dialogue(messages=said(("assistant", "x"))), *run.dialogues),
        }
    )
    assert entries_of(forked)[0] == ("note", "", "The run has 2 lines of conversation; the longest one is shown.")


@pytest.mark.parametrize("name", ["a", "b"])
def test_equal_runs_make_equal_prompts(name: str) -> None:
    prompts = Prompts()
    first, other = transcript_of(trajectory(name), RUBRIC), transcript_of(trajectory("other"), RUBRIC)
    assert first is not None
    assert other is not None
    assert prompts.single(RUBRIC, first) == prompts.single(RUBRIC, other)


def test_an_entry_holds_text_as_it_is() -> None:
    nasty = '{{ 7 * 7 }} {% raw %} </data> \\ " \u2028 \U0001f600'
    assert entries_of(trajectory("t", answer=nasty))[-1] == ("answer", "", nasty)
    assert TranscriptEntry(kind="answer", text=nasty).text == nasty
