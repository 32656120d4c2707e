"""Line protocols between commands or services and the programs that they start.

A program reads lines from standard input and writes lines to standard output, for example
`python -m headrace_scorer.replay`. Each line consists of a word, a space and JSON.

`headrace models register`, `import` and `export` start the importing program, which can load weights. `headrace train`
starts the tokenizing program, which applies a model's tokenizer and chat template: the first line is `base`, and the
program replies `opened`; each following line is a `row`, and the program replies `written` or `refused` in the same
order.

The gate's program, which plays held-out tasks, writes JSON alone. It first prints one `Tasks`. Then it reads one `Play`
per line and prints one `PlayResult` for each, in any order and with any number of concurrent plays. It exits at the
end of its standard input.

A replay and `headrace controls` start programs of services. A replay has its own topics, `replay-<lineage>-<topic>`,
with one partition each, so that their records are ordered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from headrace_schemas.events.chat import Message, Tool
from headrace_schemas.events.checkpoint import Checkpoint, DropReason, TrainingMetrics
from headrace_schemas.values.base import Finite, Model, ModelName, Sha256, Text, TokenIds, Version
from headrace_schemas.values.blobs import BlobRef

MANIFEST_FILE = "headrace_manifest.json"
"""Name of the manifest in an exported folder. With it, importing the folder restores the same version."""
Names = Annotated[tuple[Text, ...], Field(min_length=1, max_length=100_000)]


class FolderLine(Model):
    """Input line `folder` of the importing program: the request to store the model files in a folder as a version."""

    folder: str
    name: ModelName | None = None
    """The model. Without it the folder must contain an exported version."""
    base: BlobRef | None = None
    """The manifest of the version that an adapter applies to."""


class StoredLine(Model):
    """Output line `stored`, the reply to `folder`: the version that was made of the folder, with its manifest."""

    version: Version
    manifest: BlobRef


class MergeLine(Model):
    """Input line `merge` of the importing program: the request to write adapter and base as one model to a folder."""

    adapter: BlobRef
    base: BlobRef
    folder: str


class MergedLine(Model):
    """Output line `merged`, the reply to `merge`: the folder with the merged model."""

    folder: str


class BaseLine(Model):
    """Input line `base` of the tokenizing program: folder of the base model, whose tokenizer and chat template are
    used.
    """

    folder: str
    tokens_max: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a row, or None for the model's context length. Longer rows are refused."""


class OpenedLine(Model):
    """Output line `opened` of the tokenizing program: it has loaded the tokenizer of the line `base`, and accepts rows
    of at most `tokens_max` tokens.
    """

    tokens_max: int


class RowLine(Model):
    """Input line `row` of the tokenizing program: a conversation from a data file of `headrace train`.

    The model is trained on the assistant messages in `answers`, except those in `untrained`.
    """

    number: Annotated[int, Field(ge=1)]
    prompt: tuple[Message, ...] = Field(default=(), max_length=8192)
    answers: tuple[Annotated[tuple[Message, ...], Field(min_length=1, max_length=8192)], ...] = Field(
        min_length=1, max_length=64
    )
    """Alternative continuations of the prompt, which are compared with each other."""
    tools: tuple[Tool, ...] = Field(default=(), max_length=1024)
    untrained: tuple[int, ...] = ()
    """Indices, counted from the first message of the prompt, of assistant messages that are not trained."""
    shown: bool = False
    """Whether the reply contains the text of each part."""


class WrittenSpan(Model):
    """Tokens of the assistant message with the index `message`."""

    start: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=1)]
    message: Annotated[int, Field(ge=0)]


class WrittenBranch(Model):
    """One token sequence of a row to be trained. A row has several if the chat template renders an earlier message
    differently once later ones follow.
    """

    token_ids: TokenIds
    spans: tuple[WrittenSpan, ...] = Field(min_length=1)
    texts: tuple[str, ...] = ()
    """The texts of context and of trained tokens in turn; empty unless the row has `shown` set."""


class WrittenLine(Model):
    """Output line `written` of the tokenizing program: for each answer of a row, the token sequences (branches) to
    train.
    """

    number: int
    answers: tuple[tuple[WrittenBranch, ...], ...]


class RefusedLine(Model):
    """Output line `refused` of the tokenizing program: a row that cannot be tokenized for training.

    `kind` is a stable word, `reason` a sentence.
    """

    number: int
    kind: str
    reason: str


class Tasks(Model):
    """The first line from the gate's program: the names of all tasks.

    A task that is listed twice counts twice. Other fields are ignored.
    """

    model_config = ConfigDict(extra="ignore")

    gate: Names
    """The tasks that decide whether a version may serve."""
    audit: Names
    """The tasks that take part in no decision. Only their scores are reported."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        both = set(self.gate) & set(self.audit)
        if both:
            raise ValueError(f"{len(both)} tasks are in both gate and audit, e.g. {min(both)!r}")
        return self


class Play(Model):
    """A line to the gate's program: the request to play a task once with a version and a random seed."""

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]


class PlayResult(Model):
    """A line from the gate's program: the score of one `Play`. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    score: Annotated[Finite, Field(ge=0, le=1)]


BATCH_HEADER = "headrace_batch"
"""Header of a copied record for each batch that the original lineage cut after the record, in order. Its value is the
decimal number of experiences in the batch, including those that were left out."""

LEFT_OUT_HEADER = "headrace_left_out"
"""Header of a copied record for each experience that the original lineage left out of a batch which it cut after the
record. Its value is the id of the experience."""

TOPIC_PREFIX = "replay-"


def topic_prefix(lineage: str) -> str:
    """Return the prefix of the topic names of the replay into `lineage`."""
    return f"{TOPIC_PREFIX}{lineage}-"


class ClosedLine(Model):
    """Input line `closed` of a scorer's replay: a trajectory of the original lineage, whether it is replayed or not.

    Its offsets determine with which trajectory of a session feedback is matched.
    """

    trajectory_id: str
    session_key: str
    tenant: str
    time_ms: int
    """The time at which it was closed. Trajectories that were closed together have the same time."""
    place: int
    """Offset of the trajectory on `trajectories`."""
    began: int | None = None
    """Offset of its first turn on `turns`, or None if it was ingested."""
    partition: int | None = None
    """Partition of the record. Feedback about a task has one copy per partition."""


class FeedbackLine(Model):
    """Input line `feedback` of a scorer's replay: a feedback event, its offset, and the end offsets of `turns` and
    `trajectories` when it was sent (see `Envelope.after`).
    """

    event: dict[str, JsonValue]
    place: int
    turns_until: int | None = None
    trajectories_until: int | None = None


class ScoredLine(Model):
    """Line `scored`, the last output of a scorer's replay: counts of results by kind."""

    trajectories: Annotated[int, Field(ge=0)] = 0
    experiences: dict[str, int] = Field(default_factory=dict)
    """Number of experiences by `rewarded` or by the reason for no reward."""
    not_trained: dict[str, int] = Field(default_factory=dict)
    """Number of trajectories without experiences by reason: `eval`, `nothing_sampled`, `unreadable` or `failed`."""
    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Number of results of reward functions by source and outcome."""


class JudgedLine(Model):
    """Line `judged`, the last output of a judge's replay: counts of rewards by source and outcome."""

    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)


class RecordedBatch(Model):
    """Input line `recorded` of a trainer's replay: a batch of the original lineage and its result, in order."""

    digest: Sha256
    left_out: tuple[Text, ...] = ()
    trained: bool = True
    """False if the gradient was not finite, so that the experiences of the batch were dropped."""
    published: bool = False
    """Whether the weights after the batch were published as a version."""


def recorded_batches(accounts: Iterable[TrainingMetrics]) -> tuple[RecordedBatch, ...]:
    """Return the batches that a lineage trained, in order.

    Args:
        accounts: training reports of the lineage in order, each once.
    """
    batches: list[RecordedBatch] = []
    steps = 0
    for account in accounts:
        for batch in account.batches:
            trained = batch.step > steps
            batches.append(RecordedBatch(digest=batch.digest, left_out=batch.left_out, trained=trained))
            steps = batch.step
        if account.version is not None and batches:
            batches[-1] = batches[-1].model_copy(update={"published": True})
    return tuple(batches)


class DryRunBatch(Model):
    """Batch that the trainer would form in a dry run: the number of its experiences and a digest of its content."""

    experiences: int
    digest: Sha256


class DryRunLine(Model):
    """Result of a dry run of the trainer, printed as one line: how many experiences it would train, drop for which
    reason, or leave waiting, and in which batches.
    """

    trained: int = 0
    dropped: dict[DropReason, int] = Field(default_factory=dict)
    duplicates: int = 0
    other_models: int = 0
    waiting: int = 0
    """Number of remaining experiences, too few for a batch."""
    batches: tuple[DryRunBatch, ...] = ()
    versions: int = 0


class ShortRun(Model):
    """Line `trained`, the only output of a short training for control experiments: its versions and outcomes."""

    base: Checkpoint
    last: Checkpoint
    """The last version. It is the base if no step changed the weights."""
    trained: Annotated[int, Field(ge=0)]
    dropped: dict[DropReason, int] = Field(default_factory=dict)
    steps: Annotated[int, Field(ge=0)]
    stopped: str | None = None
    """The reason why `[trainer.health]` stopped the training early."""


class MeasureRequest(Model):
    """A line `measure` to the registry's program: the request for a number of plays of audit tasks with a version."""

    version: Version
    plays: Annotated[int, Field(ge=1, le=1_000_000)]


class MeasureResult(Model):
    """A line `measured`: task and score of each play. Tasks, seeds and their order are the same for all versions."""

    version: Version
    scores: tuple[tuple[Text, Finite], ...]
