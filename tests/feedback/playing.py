"""One play: feedback, a world that receives it in a random order, and the comparison with the oracle.

Content of a trainer's weights after all revisions, against the oracle's last words, and the outcomes in the
account.

The trainer is the dry run: admission, pairing, batches and corrections are the real ones, without a model.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headrace_operations.turn_account import turn_account_of
from headrace_runtime.settings.sections import complete
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint, Event, Experience, TrainingMetrics
from headrace_schemas.programs import ClosedLine, FeedbackLine
from headrace_schemas.values.blobs import BlobRef
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.replay import Rescoring
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.experiences.admission import learned_signals
from headrace_trainer.replay import DryRun
from headrace_trainer.settings import TrainerSettings
from tests.feedback.comparing import WEIGHTS, Oracle, differences, weight
from tests.feedback.world import (
    LABELS,
    Answer,
    Saying,
    Scene,
    Talk,
    Tick,
    branches,
    events,
    partition_of,
    scenes,
    trajectory,
    world,
)
from tests.support import tiny_model
from tests.support.turns import START, VERSION

TRAINED: Mapping[str, frozenset[str]] = {
    "sft": frozenset({"edit"}),
    "dpo": frozenset({"edit", "preference"}),
    "kto": frozenset({"edit", "preference", "value"}),
    "reinforce++": frozenset({"value"}),
}
"""Kinds of feedback that each algorithm trains."""
NEEDS_LOGPROBS = frozenset({"reinforce++"})
_NUMBER = re.compile(r'(?:better |"at": )(\d+)')
_GOOD = 0.5
Signs = Counter[tuple[str, Answer | None, str]]
"""Signs of the examples that the weights hold, by kind, answer and detail."""


def training_differences(
    algorithm: str,
    sent: Sequence[Experience],
    sayings: Sequence[Saying],
    scenes: Sequence[Scene],
    oracle: Oracle,
    folder: Path,
) -> list[str]:
    """Return the differences between an algorithm's training and the oracle's last words, in sentences."""
    try:
        signs = _train(algorithm, sent, folder)
    except AssertionError as error:  # a trainer that contradicts itself has not trained the last words either
        return [f"{algorithm}: the trainer fails: {error}"]
    problems = [] if algorithm in NEEDS_LOGPROBS else list(_differences(signs, _expected(algorithm, scenes, oracle)))
    return problems + _unnamed(algorithm, sayings, scenes, sent, folder)


def _settings(algorithm: str, folder: Path) -> TrainerSettings:
    base = folder / "base"
    if not base.is_dir():
        tiny_model.build(base, layers=1)
    table: dict[str, Any] = {
        "base": str(base), "model": "m", "algorithm": algorithm, "steps_per_version": 1_000_000, "batch_experiences": 4,
        "batch_experiences_min": 1,
        "advantage": {"stray_factor": 0}, "memory": {"examples": 1024, "queue_experiences": 16_384},
    }  # fmt: skip
    settings: TrainerSettings = complete(TrainerSettings).model_validate(table)
    return settings


def _train(algorithm: str, sent: Sequence[Experience], folder: Path) -> dict[str, Signs]:
    """Return the content of the weights for each experience after the revisions, in the order in which they were
    sent.
    """
    run = DryRun(_settings(algorithm, folder), BlobStore((folder / "blobs").as_uri()))
    version = run._state.history.head
    for experience in sent:
        run.add(_of_version(experience, version))
    run.end()
    state, number = run._state, _number_reader(folder / "base")
    signs_by_experience: dict[str, Signs] = {}
    for name in state.window:
        entry = state.window.get(name)
        assert entry is not None
        contributions = entry.contributions_in_weights(state.history, state.steps)
        sums: Counter[str] = Counter()
        details = {contribution.part: contribution.what for contribution in contributions}
        for contribution in contributions:
            sums[contribution.part] += round(contribution.advantage)
        numbers = {
            part.partition("/")[2]: number(detail.tokens)
            for part, detail in details.items()
            if detail is not None and detail.tokens
        }
        signs: Signs = Counter()
        for part, value in sums.items():
            kind, _, rest = part.partition("/")
            detail = details[part]
            answer = None if detail is None or not part else (detail.turn_id, detail.choice)
            if kind == "preference":
                signs[kind, answer, "chosen" if value > 0 else "rejected"] += abs(value)
            else:
                signs[kind or "branch", answer, numbers.get(rest, "")] = value
        signs_by_experience[name] = _without_zeros(signs)
    return signs_by_experience


def _without_zeros(signs: Signs) -> Signs:
    return Counter({key: value for key, value in signs.items() if value})


def _of_version(experience: Experience, version: str) -> Experience:
    """Return the experience as of the version that is trained; another server's answers keep their version."""
    branch = experience.branch
    if branch is None:
        return experience
    spans = tuple(
        span if span.version != VERSION else span.model_copy(update={"version": version}) for span in branch.spans
    )
    return experience.model_copy(update={"branch": branch.model_copy(update={"spans": spans})})


def _number_reader(base: Path) -> Callable[[Sequence[int]], str]:
    """Return a function that reads the number of the saying from the tokens of its edit."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    return lambda tokens: _number(str(tokenizer.decode(list(tokens), skip_special_tokens=False)))


def _number(text: str) -> str:
    match = _NUMBER.search(text.replace("\\", ""))
    assert match is not None, f"{text!r} is no edit of these plays"
    return match[1]


def _expected(algorithm: str, scenes: Sequence[Scene], oracle: Oracle) -> dict[str, Signs]:
    """Return the content that the weights must have: the last words, however the answers were sampled."""
    kinds, expected = TRAINED[algorithm], {}
    preferences: dict[Answer, Counter[str]] = {}
    for _, _, chosen, rejected in oracle.preferences():
        preferences.setdefault(chosen, Counter())["chosen"] += 1
        preferences.setdefault(rejected, Counter())["rejected"] += 1
    for scene in scenes:
        trajectory_id = trajectory(scene).trajectory_id
        for index, answers in enumerate(branches(scene)):
            words, signs = oracle.expected_of(scene, answers), Counter[tuple[str, Answer | None, str]]()
            for answer, _, text in words.edits:
                signs["edit", answer, _number(text)] = 1
                if algorithm != "sft":
                    signs["replaced", answer, _number(text)] = -1
            for answer in answers if "preference" in kinds else ():
                for side, count in preferences.get(answer, {}).items():
                    signs["preference", answer, side] = count
            if "value" in kinds and words.reward is not None:
                signs["branch", None, ""] = 1 if words.reward >= _GOOD else -1
            expected[Experience.id_of(trajectory_id, index)] = signs
    return expected


def _differences(signs: Mapping[str, Signs], expected: Mapping[str, Signs]) -> Iterator[str]:
    for name, words in expected.items():
        weights = signs.get(name, Counter())
        for kind, answer, detail in sorted(words.keys() | weights.keys(), key=repr):
            key = kind, answer, detail
            if weights[key] != words[key]:
                yield f"{name}: the weights hold {weights[key]} of {kind} {detail} of {answer}, not {words[key]}"


def _unnamed(
    algorithm: str, sayings: Sequence[Saying], scenes: Sequence[Scene], sent: Sequence[Experience], folder: Path
) -> list[str]:
    """Return a sentence where the account names more or fewer feedbacks without effect than the algorithm has."""
    runs = [trajectory(scene).model_copy(update={"end_reason": "ingest"}) for scene in scenes]
    blob = BlobRef(uri="memory://none", sha256="0" * 64, size=1)
    announced = Checkpoint(
        time=START, model="m", version=VERSION, lineage="main", step=0, manifest=blob,
        learns=learned_signals(_settings(algorithm, folder)),
    )  # fmt: skip
    report = TrainingMetrics(time=START, model="m", lineage="main", step=0)
    feedback_events: list[Event] = [event for saying in sayings for event in events(saying)]
    account = turn_account_of([*runs, *sent, announced, report, *feedback_events])
    counted = [saying for saying in sayings if not saying.withdrawn and saying.form != "facts"]
    without_effect = sum(_is_unused(saying, algorithm) for saying in counted if saying.where != "task")
    named = sum(account.untaught.values())
    if named == without_effect:
        return []
    return [f"{without_effect} feedbacks train nothing with {algorithm}, and the account names {named}"]


def _is_unused(saying: Saying, algorithm: str) -> bool:
    """Return whether the algorithm can train none of the feedback, by other code than the services'."""
    kind = saying.form if saying.form in ("edit", "preference") else "value"
    if kind not in TRAINED[algorithm]:
        return True
    return algorithm in NEEDS_LOGPROBS and "free" not in saying.scene.sampled.values()


PER_SCENE = 25


def talk(seed: int, count: int) -> tuple[list[Scene], list[Saying]]:
    all_scenes = scenes(max(4, count // PER_SCENE), seed)
    return all_scenes, Talk(all_scenes, seed).sayings(count)


async def differing(
    url: str,
    data_dir: Path,
    seed: int,
    count: int,
    combine: Literal["mean", "sum"] = "mean",
    tick: Tick | None = None,
    algorithms: Collection[str] = (),
) -> list[str]:
    """Return the differences from the oracle, in sentences: of the experiences, and of the training by `algorithms`."""
    played_scenes, sayings = talk(seed, count)
    async with world(url, data_dir, weights=WEIGHTS, combine=combine) as running_world:
        await running_world.play(sayings, played_scenes, seed, tick)
        try:
            newest = running_world.newest()
        except AssertionError as error:
            return [str(error)]
        oracle, sent = Oracle(weight, combine), list(running_world.stream.sent(Experience))
    problems = differences(sayings, played_scenes, newest, oracle)
    for algorithm in algorithms:
        problems += training_differences(algorithm, sent, sayings, played_scenes, oracle, data_dir)
    return problems


async def replayed(seed: int, count: int) -> list[str]:
    """Return the same differences of a replay, which reads all feedback beforehand, in another order."""
    played_scenes, sayings = talk(seed, count)
    chosen = ScorerSettings.model_validate({"labels": LABELS, "weights": WEIGHTS})
    rescoring = Rescoring(chosen, FunctionPool(chosen))
    sent = [(saying, event) for saying in sayings for event in events(saying)]
    random.Random(seed).shuffle(sent)
    for saying, event in sent:
        line = FeedbackLine(event=event.model_dump(mode="json"), place=saying.number, turns_until=10**6)
        rescoring.add_line("feedback", line.model_dump_json().encode())
    newest: dict[str, Experience] = {}
    runs = [trajectory(scene) for scene in played_scenes]
    for number, run in enumerate(runs):
        closed = ClosedLine(
            trajectory_id=run.trajectory_id,
            session_key=run.session_key,
            tenant=run.tenant,
            time_ms=0,
            place=number,
            began=run.turns_from,
            partition=partition_of(run.session_key),
        )
        rescoring.add_line("closed", closed.model_dump_json().encode())
    for run in runs:
        result = rescoring.accept(await rescoring.score(run.to_json()))
        newest |= {saying.experience_id: saying for saying in result}
    return differences(sayings, played_scenes, newest, Oracle(weight))
