"""Tests of the algorithm `hindsight`, whose teacher is the base model with the user's reply in its prompt.

Training is refused if the base does not use replies. The oracle is independent: whole sequences through transformers'
own forward pass, and NumPy for the rest.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace_schemas import Experience
from headrace_trainer.algorithms.catalog.hindsight import GapEstimate, HindsightSettings, ReplyBlock
from headrace_trainer.batches.batch import Hindsight, Row
from headrace_trainer.batches.cutting import decay
from headrace_trainer.batches.prepare import PreparedBatch, prepare
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.learner import StepRefused
from headrace_trainer.lineage.health import TrainingStopped
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.torch_learner import hindsight as teaching
from headrace_trainer.torch_learner.hindsight import HindsightTeacher
from headrace_trainer.torch_learner.learner import TorchLearner
from headrace_trainer.torch_learner.model.policy import Policy
from tests.support.tiny_model import (
    LETTERS,
    OPENING,
    QUESTION,
    contradiction,
    conversations,
    encoder,
    of_version,
    train_base,
    user_message,
)
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_forward import open_policy
from tests.unit.trainer.world import START, World, policy_of, torch_learner

GOING_ON = threading.Event()
Floats = NDArray[np.float64]
VERSION = "m@0123456789abcdef"


def row(number: int, prompt: Sequence[int], answer: Sequence[int], reply: Sequence[int], then: Sequence[int]) -> Row:
    """Return the row of a contradicted answer, with the user's reply and the next answer."""
    tokens_T = np.array([*prompt, *answer], np.int32)
    mask_T = np.arange(len(tokens_T)) >= len(prompt)
    prompt_T, reply_T, next_T = (np.array(tokens, np.int32) for tokens in (prompt[:-1], reply, then))
    behaviour_T = np.where(mask_T, np.float32(-1.5), np.float32(0))
    hindsight = Hindsight(prompt_T, reply_T, next_T, 1.0)
    ones_T = np.ones(len(tokens_T), np.float32)
    return Row(f"e{number}", 0, tokens_T, mask_T, behaviour_T, ones_T, np.float32(1), ~mask_T, hindsight=hindsight)


class Reader:
    """Policy under which tokens of the context are more likely (`reads`), or that ignores the context."""

    def __init__(self, collate: Callable[[list[Row]], Any], *, reads: bool = True) -> None:
        self.collate = collate
        self._reads = reads

    def reference_logprobs(self, pack: Any) -> torch.Tensor:
        logprobs: list[float] = []
        for pack_row in pack.rows:
            context = pack_row.token_ids_T[~pack_row.loss_mask_T] if self._reads else ()
            logprobs += [
                math.log(0.5 if token in context else 0.05) for token in pack_row.token_ids_T[pack_row.loss_mask_T]
            ]
        return torch.tensor(logprobs)

    def logprobs(self, pack: Any) -> tuple[torch.Tensor, None]:
        return self.reference_logprobs(pack), None


def rows_of(count: int, *, seed: int = 0, shuffled: bool = False) -> list[Row]:
    """Return rows whose reply contains the token of the next answer. With `shuffled`, replies belong to other rows."""
    draw = random.Random(seed)
    right = [draw.randrange(50, 300) for _ in range(count)]
    named = draw.sample(right, count) if shuffled else right
    return [row(n, (1, 2, 3), (40, 41), (7, name, 3), (token,)) for n, (token, name) in enumerate(zip(right, named))]  # noqa: B905


def teacher_after_use(base: Path, rows: list[Row], *, reads: bool = True, **settings: Any) -> HindsightTeacher:
    """Return a teacher that has estimated the advantages of `rows` once. Raises `StepRefused`."""
    policy = open_policy(base)
    teacher = HindsightTeacher(HindsightSettings(**settings), 512)
    teacher.estimate(Reader(policy.collate, reads=reads), [policy.collate(rows)], [], GOING_ON)  # type: ignore[arg-type]
    return teacher


def test_a_base_that_reads_replies_has_a_gap(base: Path) -> None:
    teacher = teacher_after_use(base, rows_of(24))
    assert teacher.measured["hindsight_gap"] == pytest.approx(math.log(10))
    assert teacher.measured["hindsight_gap_chance"] < 0.001


def test_planted_replies_of_others_have_none_in_any_seed(base: Path) -> None:
    for seed in range(8):
        with pytest.raises(StepRefused, match=r"gap between teacher and student is .* nats a token over 24 runs"):
            teacher_after_use(base, rows_of(24, seed=seed, shuffled=True))


def test_planted_a_teacher_that_is_told_nothing_has_a_gap_of_zero_and_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        StepRefused, match=r"is 0 nats a token over 24 runs, and not surely positive: .* in 100\.0% \(at most 0\.8%\)"
    ):
        teacher_after_use(base, rows_of(24), reads=False)
    monkeypatch.setattr(teaching, "_prompt_with_reply", lambda row, other=None: row.token_ids_T[~row.loss_mask_T])
    with pytest.raises(StepRefused, match=r"is 0 nats a token over 24 runs"):
        teacher_after_use(base, rows_of(24))


def test_a_reply_that_everybody_gives_says_nothing_of_its_own(base: Path) -> None:
    same = [
        replace(contradicted_row, hindsight=replace(_hindsight(contradicted_row), reply_T=np.array([7, 9, 3])))
        for contradicted_row in rows_of(24)
    ]
    with pytest.raises(StepRefused, match=r"over 24 runs, and not surely positive"):
        teacher_after_use(base, same)


def test_few_runs_are_not_believed(base: Path) -> None:
    with pytest.raises(StepRefused, match=r"measured on 3 runs, and 4 are needed; raise trainer\."):
        teacher_after_use(base, rows_of(3))
    with pytest.raises(StepRefused, match=r"measured on 0 runs"):
        teacher_after_use(base, rows_of(1))


def test_what_was_measured_and_the_guard_set_go_with_the_state(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_trainer.torch_learner.hindsight.GUARD_ANSWERS_MAX", 2)
    accepted = [replace(guard_row, hindsight=None, experience_id=f"a{n}") for n, guard_row in enumerate(rows_of(3))]
    teacher = teacher_after_use(base, [*rows_of(24), *accepted])
    (other := HindsightTeacher(HindsightSettings(), 512)).load(teacher.state())
    assert other.gap == teacher.gap
    assert [guard_row.token_ids_T.tolist() for guard_row in other.guard] == [
        guard_row.token_ids_T.tolist() for guard_row in accepted[1:]
    ]
    assert [guard_row.loss_mask_T.tolist() for guard_row in other.guard] == [
        guard_row.loss_mask_T.tolist() for guard_row in accepted[1:]
    ]
    other.load({})
    assert (other.gap, len(other.guard)) == (GapEstimate(), 0)


def _hindsight(row: Row) -> Hindsight:
    assert row.hindsight is not None
    return row.hindsight


def lineage_with_events(
    world: World, make: Make, events: Callable[[str], Sequence[Experience]], **settings: Any
) -> Lineage:
    lineage = open_lineage(make(algorithm="hindsight", **settings), world.blobs, world.clock)
    for index, event in enumerate(events(lineage.state.history.head)):
        lineage.state.admit(event, (0, index), START)
    return lineage


@torch.no_grad()
def answer_logprobs(policy: Policy, context: Sequence[int], answer: Sequence[int]) -> Floats:
    """Return log pi(answer | context), computed by transformers alone."""
    logits_TV = policy.model(torch.tensor([[*context, *answer]])).logits[0].double().numpy()
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    return np.array([logprobs_TV[len(context) - 1 + n, token] for n, token in enumerate(answer)])


def oracle(
    policy: Policy, base: Path, events: Sequence[Experience], limit: float
) -> tuple[Floats, Floats, list[float]]:
    """Return the advantages and losses of the tokens of contradicted answers, and the gap of each run.

    The oracle renders the texts again."""
    encode, advantages, losses, gaps = encoder(base), [], [], []
    ordered = sorted(events, key=lambda event: event.experience_id)
    letters = [_letters(base, event) for event in ordered]
    block = 5  # ten runs make two blocks
    for index, (first, second, named) in enumerate(letters):
        prompt, wrong, right = encode(QUESTION + OPENING), encode(f"{first}<|im_end|>"), encode(f"{second}<|im_end|>")
        told_prompt = encode(QUESTION + user_message(contradiction(named)) + OPENING)
        own_block = range(index // block * block, index // block * block + block)
        other_prompts = [
            encode(QUESTION + user_message(contradiction(letters[n][2])) + OPENING) for n in own_block if n != index
        ]
        behaviour_N = np.array([-2.0, -0.01])
        advantage_N = np.clip(answer_logprobs(policy, told_prompt, wrong) - behaviour_N, -limit, limit)
        weight_N = np.minimum(np.exp(answer_logprobs(policy, prompt, wrong) - behaviour_N), 2.0)
        advantages.append(advantage_N)
        losses.append(-weight_N * advantage_N)
        own_logprob, none = (answer_logprobs(policy, context, right).mean() for context in (told_prompt, prompt))
        others_logprob = np.mean([answer_logprobs(policy, context, right).mean() for context in other_prompts])
        gaps.append(float(own_logprob - max(others_logprob, none)))
    return np.concatenate(advantages), np.concatenate(losses), gaps


def _letters(base: Path, event: Experience) -> tuple[str, str, str]:
    from tokenizers import Tokenizer

    assert event.branch is not None
    text = Tokenizer.from_file(str(base / "tokenizer.json")).decode(list(event.branch.token_ids))
    return text.split("assistant\n")[1][0], text.split("assistant\n")[2][0], text.split("it is ")[1][0]


def prepared_of(lineage: Lineage, items: Sequence[WaitingExperience]) -> PreparedBatch:
    """Return the prepared batch of a step on `items`."""
    settings = lineage._settings
    return prepare(items, lineage.state, settings.advantage, decay(settings), loss=settings.loss)


def teacher_of(lineage: Lineage) -> HindsightTeacher:
    teacher = torch_learner(lineage)._token_estimator
    assert isinstance(teacher, HindsightTeacher)
    return teacher


def told_of(lineage: Lineage) -> dict[str, Floats]:
    """Return the advantages of each contradicted answer in a step by its experience id."""
    policy, prepared = policy_of(lineage), prepared_of(lineage, lineage.next_batch())
    packs, _ = teacher_of(lineage).estimate(policy, [policy.collate(list(prepared.batch.rows))], [], GOING_ON)
    (pack,) = packs
    advantages, rows = pack.advantage_N.double().numpy(), pack.row_N.numpy()
    return {pack_row.experience_id: advantages[rows == n] for n, pack_row in enumerate(pack.rows)}


def off_oracle(tmp_path: Path, make: Make, base: Path) -> float:
    """Return the largest difference of advantages, gap and loss from the oracle's."""
    world, events = World(tmp_path), conversations(encoder(base), VERSION, 10, seed=3)
    lineage = lineage_with_events(world, make, of_version(events, VERSION), batch_experiences=10)
    advantages, losses, gaps = oracle(policy_of(lineage), base, events, limit=5.0)
    by_name = told_of(lineage)
    teacher = teacher_of(lineage)
    computed = np.concatenate([by_name[name] for name in sorted(by_name)])
    off = [float(np.abs(computed - advantages).max()), abs(teacher.gap.mean - float(np.mean(gaps)))]
    loss = lineage.step(lineage.next_batch(), GOING_ON).get("loss", math.inf)
    return max(*off, abs(loss - float(losses.mean())))


@pytest.fixture
def believing(monkeypatch: pytest.MonkeyPatch, make: Make) -> Make:
    """Injected fault: a base without any gap is accepted."""
    monkeypatch.setattr(teaching, "refusal", lambda gap, settings: None)
    return make


def test_advantages_gap_and_loss_equal_the_oracle_s(tmp_path: Path, believing: Make, base: Path) -> None:
    assert off_oracle(tmp_path, believing, base) < 1e-5


def _flipped(self: HindsightTeacher, pack: Any) -> Any:
    return replace(pack, advantage_N=-GRADED(self, pack).advantage_N)


def _own_context(row: Row) -> Row:
    return teaching._scored_row(row.token_ids_T, len(row.token_ids_T) - row.tokens, 1.0)


def _shifted(self: HindsightTeacher, rows: Sequence[Row]) -> list[ReplyBlock]:
    return [ReplyBlock(np.roll(block.with_reply_BB, 1, axis=1), block.without_reply_B) for block in BLOCKS(self, rows)]


GRADED, BLOCKS = HindsightTeacher._with_advantages, HindsightTeacher.blocks
FAULTS: dict[str, tuple[object, str, object]] = {
    "the sign is flipped": (HindsightTeacher, "_with_advantages", _flipped),
    "the teacher is told nothing": (teaching, "_teacher_row", _own_context),
    "the reply of the next run": (HindsightTeacher, "blocks", _shifted),
    "the reply to nobody": (teaching, "_prompt_without_reply", lambda row: row.token_ids_T[:1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_off(
    fault: str, tmp_path: Path, believing: Make, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert off_oracle(tmp_path, believing, base) > 1e-4


def test_a_base_that_cannot_read_is_refused_and_nothing_is_trained(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    last = {"advantage": {"kind": "hindsight", "hindsight": {"runs_max": 12}}}
    lineage = lineage_with_events(
        world, make, lambda v: conversations(encoder(base), v, 12, accepted=4), batch_experiences=16, **last
    )
    learner = lineage.learner
    assert isinstance(learner, TorchLearner)
    before = learner.freeze().weights
    assert lineage.step(lineage.next_batch(), GOING_ON) == {}
    assert lineage.health.stopped is not None
    assert "nats a token over 12 runs, and not surely positive" in lineage.health.stopped.reason
    assert learner.freeze().weights == before
    assert (lineage.state.steps, len(lineage.state.waiting), lineage.next_batch()) == (0, 16, ())
    again = lineage.health.with_limits(lineage._settings.health)
    assert again.stopped == lineage.health.stopped, "a restart changes nothing"
    lineage.resume()
    assert len(lineage.next_batch()) == 16


async def test_a_job_ends_with_the_figure(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    settings = make(algorithm="hindsight", batch_experiences=12)
    await world.run(settings)
    world.bus.produce(*conversations(encoder(base), world.bus.checkpoints[0].version, 12))
    with pytest.raises(
        TrainingStopped, match=r"has stopped training: the gap between teacher and student is -?[0-9.]+"
    ):
        await world.run(settings.model_copy(update={"until_end": True}))
    assert len(world.bus.checkpoints) == 1, "there is nothing to offer"
    assert world.bus.accounts[-1].stopped is not None


def test_a_guard_set_that_drops_stops_the_version(tmp_path: Path, believing: Make, base: Path) -> None:
    world, health = World(tmp_path), {"patience_steps": 1, "mismatch_max": 0.0, "effective_sample_min": 0.0}
    events = lambda version: conversations(encoder(base), version, 12, accepted=8)  # noqa: E731
    rash = {"batch_experiences": 20, "optimizer": {"learning_rate": 0.3}, "health": health}
    lineage = lineage_with_events(world, believing, events, **rash)
    measured = lineage.step(lineage.next_batch(), GOING_ON)
    assert measured["guard_drop"] > 0.05
    assert lineage.health.stopped is not None
    assert lineage.health.stopped.reason.startswith("guard_drop is ")
    assert not lineage.is_version_due
    careful = {"batch_experiences": 20, "optimizer": {"learning_rate": 1e-6}, "health": health, "lineage": "careful"}
    lineage = lineage_with_events(world, believing, events, **careful)
    assert abs(lineage.step(lineage.next_batch(), GOING_ON)["guard_drop_mean"]) < 0.01
    assert lineage.is_version_due


def test_a_verdict_that_is_withdrawn_is_taken_back(tmp_path: Path, believing: Make, base: Path) -> None:
    world = World(tmp_path)
    lineage = lineage_with_events(world, believing, lambda v: conversations(encoder(base), v, 8), batch_experiences=8)
    first = told_of(lineage)
    event = next(waiting_item.experience for waiting_item in lineage.state.waiting)
    lineage.step(lineage.next_batch(), GOING_ON)
    lineage.state.admit(event.model_copy(update={"revision": 1, "turn_rewards": ()}), (0, 9), START)
    (item,) = lineage.state.waiting
    (update,) = lineage.state.pending_updates(item)
    assert update.advantage == -1.0
    policy, prepared = policy_of(lineage), prepared_of(lineage, (item,))
    _, (back,) = teacher_of(lineage).estimate(policy, [], [policy.collate(list(prepared.batch.rows))], GOING_ON)
    assert back.advantage_N.numpy() == pytest.approx(-first[event.experience_id], abs=1e-6), "the teacher stays"
    assert prepared.batch.rows[0].correction


@pytest.mark.long
def test_typed_corrections_alone_teach_and_those_of_others_are_refused(tmp_path: Path, make: Make) -> None:
    """A model that was trained to answer B unlearns this answer where users contradict it."""
    base = train_base(tmp_path / "taught")
    world, encode = World(tmp_path), encoder(base)
    more = {"base": str(base), "batch_experiences": 32, "optimizer": {"learning_rate": 3e-3}, "max_staleness": 99}
    shuffled = lineage_with_events(
        world, make, lambda v: conversations(encode, v, 32, shuffled=True), **more, lineage="shuffled"
    )
    assert shuffled.step(shuffled.next_batch(), GOING_ON) == {}
    lineage = lineage_with_events(world, make, lambda v: [], **more)
    version, policy = lineage.state.history.head, policy_of(lineage)
    prompt = encode(QUESTION + OPENING)
    wrong = [letter for letter in LETTERS if letter in "BCD"]
    before = _share(policy, prompt, wrong, encode)
    for step in range(6):
        for index, event in enumerate(_always(encode, version, wrong, 32, 100 * step)):
            lineage.state.admit(event, (0, index), START)
        measured = lineage.step(lineage.next_batch(), GOING_ON)
        assert measured["hindsight_gap_chance"] < 0.01
    after = _share(policy, prompt, wrong, encode)
    print(f"wrong answers: {before:.3f}, then {after:.3f}")
    assert after < 0.5 * before


def _share(policy: Policy, prompt: Sequence[int], letters: Sequence[str], encode: Any) -> float:
    return float(sum(np.exp(answer_logprobs(policy, prompt, encode(letter))[0]) for letter in letters))


def _always(encode: Any, version: str, wrong: Sequence[str], count: int, first: int) -> list[Experience]:
    """Return conversations of users that never want one of the `wrong` letters."""
    from tests.support.tiny_model import conversation

    draw = random.Random(first)
    events = []
    for number in range(first, first + count):
        right = draw.choice([letter for letter in LETTERS if letter not in wrong])
        said_first = draw.choice(list(wrong))
        events.append(
            conversation(
                encode, number, version, first=said_first, second=right, reply=contradiction(right), reward=0.0
            )
        )
    return events
