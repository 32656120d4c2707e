"""Events of `trajectories`: closed sessions as token sequences with masks; and of `experiences`: their branches with
total rewards, ready to be trained."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.events.chat import FinishReason, LogitShift, Message, Tool
from headrace_schemas.events.turn import Purpose, StoredSets, SubAgent, TokenGrammar
from headrace_schemas.values.base import (
    Event,
    Finite,
    Model,
    ModelName,
    SampledLogprobs,
    SessionKey,
    Text,
    Timestamp,
    TokenIds,
    Version,
)
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX, INT32, SAMPLING, Int64, JsonObject, Total
from headrace_schemas.values.ids import derived_id

EndReason = Literal["end_call", "feedback", "commit", "idle", "limit", "ingest"]
SIDE_CALL = "side_call"
"""`Trajectory.untrained` of calls that a client made outside its task."""
NO_TOOLS = "no_tools"
"""`Turn.side_call` of a call that may be a side call, because an agent's client offers no tools in it."""
LeftOutReason = Literal["retried", "undelivered", "truncated_sampling", "empty"]
NoLogprobs = Literal["truncated_sampling", "truncated_sampling (grammar)", "foreign"]
"""Reason why the probabilities with which tokens were sampled are not known. `foreign`: another server answered."""


class Span(Model):
    """Tokens `start .. start + len(logprobs)` of a branch: one choice of one turn, written by one version.

    All tokens outside the spans are observations and have loss mask 0.
    """

    start: Annotated[int, Field(ge=0), INT32]
    logprobs: SampledLogprobs
    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    version: Version
    temperature: Annotated[Finite, Field(gt=0.0), SAMPLING] = 1.0
    finish_reason: FinishReason = "stop"
    grammar: Annotated[int, Field(ge=0), INT32] | None = None
    """Index in `Branch.grammars` of the grammar that restricted the tokens, or None. `logprobs` are those of the
    restricted distribution."""
    stored_sets: StoredSets | None = None
    """The sets of tokens that `top_p`, `top_k` and `min_p` left, or None without these."""
    logit_shift: LogitShift | None = None
    """Penalties and bias with which the tokens were sampled, or None without. `logprobs` are those of the distribution
    after them."""
    no_logprobs: NoLogprobs | None = None
    """The reason why the tokens have no logprobs of the policy that sampled them, or None if `logprobs` has them.
    Without them `logprobs` is 0 for each token, and `temperature` has no meaning. Only algorithms that need no logprobs
    of that policy train such a span."""

    @model_validator(mode="after")
    def _logprobs_are_real_or_zero(self) -> Self:
        if self.no_logprobs is not None and any(self.logprobs):
            raise ValueError(f"span of turn {self.turn_id} has no_logprobs, so each of its logprobs must be 0")
        return self

    @property
    def token_kind(self) -> Literal["free", "held", "stored", "shifted", "left_out"]:
        """How the tokens were sampled (`headrace_schemas.rules.training.TokenKind`)."""
        if self.no_logprobs is not None:
            return "left_out"
        if self.stored_sets is not None:
            return "stored"
        if self.grammar is not None:
            return "held"
        return "free" if self.logit_shift is None else "shifted"

    @property
    def restricted(self) -> bool:
        """Whether the tokens were sampled from a part of the vocabulary, or with penalties or a bias."""
        return self.grammar is not None or self.stored_sets is not None or self.logit_shift is not None

    @property
    def stop(self) -> int:
        return self.start + len(self.logprobs)


class Branch(Model):
    """One token sequence. Each token that a model wrote is in exactly one span of exactly one branch."""

    token_ids: TokenIds
    spans: tuple[Span, ...] = Field(min_length=1, max_length=4096)
    grammars: tuple[TokenGrammar, ...] = Field(default=(), max_length=4096)
    """The grammars that restricted tokens of the spans, each once."""

    @model_validator(mode="after")
    def _grammars_exist(self) -> Self:
        for span in self.spans:
            if span.grammar is not None and span.grammar >= len(self.grammars):
                raise ValueError(f"span of turn {span.turn_id} has grammar {span.grammar} of {len(self.grammars)}")
        return self

    @model_validator(mode="after")
    def _spans_lie_inside_in_order(self) -> Self:
        position = 0
        for span in self.spans:
            if not span.logprobs:
                raise ValueError(f"span of turn {span.turn_id} is empty")
            if span.start < position:
                raise ValueError(f"span of turn {span.turn_id} starts at {span.start}, inside the one before it")
            position = span.stop
        if position > len(self.token_ids):
            raise ValueError(f"spans reach token {position} of {len(self.token_ids)}")
        return self

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for tokens of spans, 0 for observations; as long as `token_ids`."""
        mask = [0] * len(self.token_ids)
        for span in self.spans:
            mask[span.start : span.stop] = [1] * len(span.logprobs)
        return tuple(mask)

    @property
    def turn_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(span.turn_id for span in self.spans))

    @property
    def sampled(self) -> Branch | None:
        """A copy of the branch with only the spans that have logprobs, cut after the last of them; None without any."""
        spans = tuple(span for span in self.spans if span.no_logprobs is None)
        if len(spans) == len(self.spans):
            return self
        return (
            self.model_copy(update={"token_ids": self.token_ids[: spans[-1].stop], "spans": spans}) if spans else None
        )


class Dialogue(Model):
    """The messages of a branch, for people and reward functions. The model wrote the last message."""

    messages: tuple[Message, ...] = Field(min_length=1, max_length=8192)


class LeftOut(Model):
    """A turn of a trajectory that is in none of its branches, with the reason."""

    turn_id: Text
    reason: LeftOutReason
    version: Version | None = None
    """The version that answered. It counts when versions are compared, even if the turn cannot be trained."""
    detail: Text | None = None
    """Detail of the reason. Earlier releases left out `truncated_sampling`, with `grammar` for that by a grammar; such
    turns are in branches now, as spans with `no_logprobs`."""

    @property
    def full_reason(self) -> str:
        """The reason with its detail in parentheses."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


class Trajectory(Event):
    """One closed run of one agent. Produced by the collector, or ingested from any agent runtime.

    Each turn belongs to exactly one trajectory. A run whose turns have several session keys is split into `parts`
    trajectories. The training weight of each is divided by `parts`, so that a run counts once.
    """

    topic: ClassVar[str] = "trajectories"
    type: ClassVar[str] = "headrace.trajectory.v1"
    sampled_text: ClassVar[bool] = True

    trajectory_id: Text
    session_key: SessionKey
    session_id: Text
    tenant: Text = "default"
    purpose: Purpose = "train"
    task_id: Text | None = None
    run_id: Text | None = None
    model: ModelName
    branches: tuple[Branch, ...] = Field(max_length=1024)
    dialogues: tuple[Dialogue, ...] = Field(default=(), max_length=1024)
    """One dialogue for each branch, in the same order, followed by dialogues without trainable tokens."""
    tools: tuple[Tool, ...] = Field(default=(), max_length=1024)
    left_out: tuple[LeftOut, ...] = Field(default=(), max_length=4096)
    untrained: Text | None = None
    """The reason why none of its turns is trained although its purpose is `train`: a fixed version answered, or it is
    a `side_call`, which the client made outside its task."""
    sub_agent: SubAgent | None = None
    """The sub-agent whose run this is, with the agent that called it. None for the session's own agent."""
    shadow_of: SessionKey | None = None
    """The user's session whose prompt this shadow run answers again, as in its turns."""
    parts: Annotated[int, Field(ge=1), INT32] = 1
    end_reason: EndReason
    started_at: Timestamp
    turns_from: Int64 | None = None
    """Offset of its first turn on `turns`, or None if it was ingested. Earlier feedback is about other trajectories."""
    context: JsonObject = Field(default_factory=dict, max_length=CONTEXT_KEYS_MAX)

    @model_validator(mode="after")
    def _dialogues_match_branches(self) -> Self:
        if self.dialogues and len(self.dialogues) < len(self.branches):
            raise ValueError(f"{len(self.dialogues)} dialogues for {len(self.branches)} branches")
        return self

    @property
    def event_id(self) -> str:
        return derived_id("trajectory", self.trajectory_id)

    @property
    def key(self) -> str:
        return self.session_key

    @property
    def subject(self) -> str:
        return self.trajectory_id

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """All turns of the run, including those that were left out."""
        branch_turns = (turn_id for branch in self.branches for turn_id in branch.turn_ids)
        return tuple(dict.fromkeys([*branch_turns, *(item.turn_id for item in self.left_out)]))

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions that answered a turn, including turns that were left out."""
        trained = (span.version for branch in self.branches for span in branch.spans)
        return tuple(dict.fromkeys([*trained, *(item.version for item in self.left_out if item.version)]))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The longest dialogue. Of equally long ones, the first whose last message is not empty comes first: one of
        several choices may be empty."""
        return max((dialogue.messages for dialogue in self.dialogues), key=_length_with_answer, default=())

    @property
    def final_answer(self) -> str:
        """The text of the model's last message, or an empty string without one."""
        last = self.messages[-1] if self.messages else None
        return last.text if last is not None and last.role == "assistant" else ""


def _length_with_answer(messages: tuple[Message, ...]) -> tuple[int, bool]:
    last = messages[-1]
    return len(messages), bool(last.text or last.tool_calls)


NoReward = Literal["no_reward", "required_source_missing", "withdrawn"]


class RewardPart(Model):
    """Contribution of one source to the combined reward: its value and weight."""

    source: Text
    value: Total
    weight: Total


class TurnReward(Model):
    """The reward of one turn of the branch, in addition to the reward of the run."""

    turn_id: Text
    value: Total


class Edit(Model):
    """The correct answer of a turn. It follows the same prompt as the answer that it replaces."""

    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    source: Text = "feedback"
    message: Message
    """The assistant message with text, tool calls or both."""


class PreferenceSide(Model):
    """One of the two answers of a preference.

    The other answer has the same `preference_id`. It is in this experience or in another one, also of another session.
    """

    preference_id: Text
    side: Literal["chosen", "rejected"]
    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    source: Text = "feedback"


class Experience(Event):
    """One branch of one trajectory with its present reward, and the turn rewards, edits and preferences of its turns.

    `experience_id` identifies the branch. `revision` counts the changes of its reward, and the highest one is valid.
    `reward` is None if the branch must not be trained (any more); `no_reward` is the reason. The trainer counts these
    experiences, too, so that every captured turn is reported as trained, waiting or dropped.
    """

    topic: ClassVar[str] = "experiences"
    type: ClassVar[str] = "headrace.experience.v1"
    sampled_text: ClassVar[bool] = True

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32] = 0
    trajectory_id: Text
    session_key: SessionKey
    session_id: Text
    tenant: Text = "default"
    task_id: Text | None = None
    """The group of the experience. Experiences of one task are compared with each other."""
    run_id: Text | None = None
    model: ModelName
    branch_index: Annotated[int, Field(ge=0), INT32] = 0
    branch: Branch | None = None
    turn_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    """The turns of the branch. A turn that was left out of all branches is in no experience."""
    weight: Annotated[Finite, Field(gt=0.0, le=1.0)] = 1.0
    """The branch's share of its run. The weights of a run's branches with logprobs add up to 1; a branch without any
    has the share that it would have among all branches."""
    reward: Total | None = None
    no_reward: NoReward | None = None
    parts: tuple[RewardPart, ...] = Field(default=(), max_length=64)
    parts_left_out: tuple[Text, ...] = Field(default=(), max_length=64)
    """Sources whose scores do not count in `reward` because `parts` is full: the first 64 by name."""
    turn_rewards: tuple[TurnReward, ...] = Field(default=(), max_length=4096)
    edits: tuple[Edit, ...] = Field(default=(), max_length=256)
    """If there are edits or preferences, `branch` is set even without a reward."""
    preferences: tuple[PreferenceSide, ...] = Field(default=(), max_length=256)
    origin: Literal["sampled", "written"] = "sampled"
    """`written` if no version sampled the tokens of the spans, because they come from a person or a data set. Then
    their logprobs are 0 and have no meaning, their version is the first one of the lineage, and only algorithms that
    need neither train them."""

    @model_validator(mode="after")
    def _trainable_or_not(self) -> Self:
        if (self.reward is None) == (self.no_reward is None):
            raise ValueError("exactly one of reward and no_reward must be set")
        if self.reward is not None and self.branch is None:
            raise ValueError("an experience with a reward needs its branch")
        if (self.edits or self.preferences) and self.branch is None:
            raise ValueError("an experience with an edit or a preference needs its branch")
        return self

    @staticmethod
    def id_of(trajectory_id: str, branch_index: int) -> str:
        """Return the `experience_id` of a branch."""
        return derived_id("experience", trajectory_id, branch_index)

    @staticmethod
    def event_id_of(experience_id: str, revision: int) -> str:
        """Return the `event_id` of a revision of an experience."""
        return derived_id("experience-revision", experience_id, revision)

    @property
    def event_id(self) -> str:
        return self.event_id_of(self.experience_id, self.revision)

    @property
    def key(self) -> str:
        return self.session_key

    @property
    def subject(self) -> str:
        return self.experience_id
