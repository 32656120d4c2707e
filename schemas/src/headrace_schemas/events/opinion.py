"""The content of feedback, shared by HTTP and Kafka: a value in one of its forms, an edit, or a preference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from headrace_schemas.events.chat import Message
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.bounds import Score
from headrace_schemas.values.ids import derived_id, refusal_of
from headrace_schemas.values.text import printable

Kind = Literal["value", "edit", "preference"]
Level = Literal["response", "turn", "session", "task"]
Metric = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f:*]{1,64}$")]
"""The name of a judged quality, for example `tone`. As a part of a source's name it contains no `:` and no `*`."""
CHOICE_MAX = 1023
ChoiceIndex = Annotated[int, Field(ge=0, le=CHOICE_MAX)]
_SOURCE_LENGTH_MAX = 512


class ComparedAnswer(Model):
    """One of the two answers of a preference."""

    turn_id: Text
    choice: ChoiceIndex = 0


class Preference(Model):
    """The better one of two answers, which are choices of one turn or of two turns in any sessions."""

    chosen: ComparedAnswer
    rejected: ComparedAnswer

    @property
    def pair(self) -> tuple[ComparedAnswer, ComparedAnswer]:
        """Both answers in an order that does not depend on which one is better."""
        first, second = sorted((self.chosen, self.rejected), key=lambda answer: (answer.turn_id, answer.choice))
        return first, second


def rule_error(field: str, problem: str) -> PydanticCustomError:
    """Return the validation error of a rule about one or several fields, with the field to correct in its message."""
    return PydanticCustomError("feedback_rule", "{field}: {problem}", {"field": field, "problem": problem})


class Opinion(Model):
    """Content of one feedback: at most one of `value`, `rating`, `label`, `parts`, `edit` and `preference`.

    If a rater of a source gives several opinions about one target, the last one is valid. HTTP endpoints and stream
    consumers validate feedback by this class.
    """

    source: Text = "feedback"
    rater: Text | None = None
    """The person or program within the source. The value of a source is the mean of its raters' last values."""
    metric: Metric | None = None
    """The judged quality. It counts as a source of its own, `source:metric`, with its own weight."""
    level: Level | None = None
    """The kind of target: one answer (`choice` of a turn), single turns, the whole run, or all runs of a task. None
    means the session, or the run whose turns `msg_ids` list; a part of the turns of a run counts as single turns."""
    choice: ChoiceIndex | None = None
    """The index of the target's answer. Without it the target is the turn with all its answers; for an edit, the first
    answer."""
    value: Score | None = None
    rating: Score | None = None
    """A point on `scale`. `value` is its position between the ends of the scale, from 0 to 1."""
    scale: tuple[Score, Score] | None = None
    label: Text | None = None
    """A word to which the scorer's settings assign a value. An unknown label is stored and abstains."""
    parts: dict[Metric, Score] = Field(default_factory=dict, max_length=32)
    """Values of several metrics. Each can be revised and withdrawn separately."""
    comment: LongText | None = None
    edit: Message | None = None
    """The correct answer of the turn, with text, tool calls or both."""
    preference: Preference | None = None
    kind: Kind | None = None
    """The kind of feedback that is withdrawn, or None for the value, or for the preference if `preference` is set."""
    withdrawn: bool = False

    @property
    def feedback_kind(self) -> Kind:
        """The kind of feedback that the opinion gives or withdraws."""
        if self.preference is not None:
            return "preference"
        return "edit" if self.edit is not None else self.kind or "value"

    @property
    def has_content(self) -> bool:
        """Whether a value, label, edit or preference is given, not only context, names or a withdrawal."""
        forms = self.value, self.label, self.edit, self.preference
        return not self.withdrawn and (bool(self.parts) or any(form is not None for form in forms))

    @property
    def metric_source(self) -> str:
        """The name under which the value counts: `source:metric`, or `source` without a metric."""
        return metric_source(self.source, self.metric)

    @model_validator(mode="after")
    def _names_are_not_reserved(self) -> Self:
        names = [("source", self.source, True), ("rater", self.rater, False), ("metric", self.metric, False)]
        names += [("parts", name, False) for name in self.parts]
        for field, name, whole_word in names:
            problem = refusal_of(name, whole_word=whole_word) if name else None
            if problem is not None:
                raise rule_error(field, f"{printable(name or '')!r} {problem}")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = {
            "value": self.value is not None and self.rating is None,
            "rating": self.rating is not None,
            "label": self.label is not None,
            "parts": bool(self.parts),
            "edit": self.edit is not None,
            "preference": self.preference is not None,
        }
        used_forms = [form for form, is_used in forms.items() if is_used]
        if len(used_forms) > 1:
            raise rule_error(used_forms[1], f"cannot be combined with {used_forms[0]}; send two feedbacks")
        if self.withdrawn and used_forms and used_forms != ["preference"] and used_forms != ["value"]:
            raise rule_error(used_forms[0], "must be omitted from a withdrawal; set kind to withdraw an edit")
        if self.kind is not None and not self.withdrawn:
            raise rule_error("kind", "is only allowed with withdrawn; omit it")
        if self.kind is not None and used_forms == ["preference"] and self.kind != "preference":
            raise rule_error("kind", f"is {self.kind}, but the withdrawal names a preference")
        if self.kind == "preference" and self.preference is None:
            raise rule_error("preference", "is required; name the two answers whose comparison is withdrawn")
        return self

    @model_validator(mode="after")
    def _rating_fits_its_scale(self) -> Self:
        if (self.rating is None) != (self.scale is None):
            missing, present = ("scale", "rating") if self.scale is None else ("rating", "scale")
            raise rule_error(missing, f"is required with {present}")
        if self.rating is None or self.scale is None:
            return self
        low, high = self.scale
        if not low < high:
            raise rule_error("scale", f"[{low:g}, {high:g}] is empty; the lower end comes first")
        if not low <= self.rating <= high:
            raise rule_error("rating", f"{self.rating:g} is not on the scale from {low:g} to {high:g}")
        normalised = (self.rating - low) / (high - low)
        if self.value is None:
            object.__setattr__(self, "value", normalised)
        elif self.value != normalised:
            raise rule_error("value", f"must be the position of the rating on its scale ({normalised:g}); omit it")
        return self

    @model_validator(mode="after")
    def _metric_is_one_of_values(self) -> Self:
        if self.metric is not None and (self.parts or self.feedback_kind == "edit"):
            raise rule_error(
                "metric", "is only allowed with one value or preference; parts name their metrics, an edit has none"
            )
        longest = max([self.metric or "", *self.parts], key=len)
        if len(metric_source(self.source, longest or None)) > _SOURCE_LENGTH_MAX:
            raise rule_error(
                "source", f"and metric have more than {_SOURCE_LENGTH_MAX} characters together; shorten them"
            )
        return self

    @model_validator(mode="after")
    def _edit_is_an_answer(self) -> Self:
        edit = self.edit
        if edit is None:
            return self
        if edit.role != "assistant":
            raise rule_error("edit", f"has the role {edit.role!r}; it must be an assistant message")
        if edit.tool_call_id is not None or not (edit.text or edit.tool_calls):
            raise rule_error("edit", "has no text and no tool calls; it must be the correct answer of the assistant")
        return self

    @model_validator(mode="after")
    def _two_answers(self) -> Self:
        if self.preference is not None and self.preference.chosen == self.preference.rejected:
            raise rule_error("preference", "compares an answer with itself; name two answers")
        if self.preference is not None and (self.level not in (None, "response") or self.choice is not None):
            raise rule_error("preference", "names its answers itself; omit level and choice")
        return self

    def preference_id(self, tenant: str) -> str:
        """Return an id that depends on the rater and the two answers, but not on which answer is better.

        So if the rater's opinion changes, it is a revision of the same preference.
        """
        assert self.preference is not None
        pair = [part for answer in self.preference.pair for part in (answer.turn_id, answer.choice)]
        return derived_id("preference", tenant, self.source, self.metric or "", self.rater or "", *pair)


def metric_source(source: str, metric: str | None) -> str:
    """Return the source name of a metric of a source, or `source` itself without a metric."""
    return source if metric is None else f"{source}:{metric}"


def values_of(opinion: Opinion, labels: Mapping[str, float]) -> Iterator[tuple[str, float | None]]:
    """Yield the sources and values of an opinion. A value is None if it is withdrawn or its label is unknown."""
    if opinion.withdrawn:
        yield opinion.metric_source, None
    elif opinion.label is not None:
        yield opinion.metric_source, labels.get(opinion.label)
    elif opinion.value is not None:
        yield opinion.metric_source, opinion.value
    for metric, value in opinion.parts.items():
        yield metric_source(opinion.source, metric), value
