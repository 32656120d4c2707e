"""What one feedback says, whatever door it came through: a value in one of its forms, an edit, or a preference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from headrace_schemas.base import LongText, Model, Text
from headrace_schemas.bounds import Score
from headrace_schemas.events.chat import Message
from headrace_schemas.ids import derived_id
from headrace_schemas.sources import refusal_of
from headrace_schemas.text import printable

Kind = Literal["value", "edit", "preference"]
Level = Literal["response", "turn", "session", "task"]
Metric = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f:*]{1,64}$")]
"""What is judged, e.g. `tone`. It becomes a part of a source's name, so it has no `:` and no `*`."""
CHOICE_MAX = 1023
ChoiceIndex = Annotated[int, Field(ge=0, le=CHOICE_MAX)]
_SOURCE_LENGTH_MAX = 512


class ComparedAnswer(Model):
    """One of the two answers of a preference."""

    turn_id: Text
    choice: ChoiceIndex = 0


class Preference(Model):
    """Of two answers the better one. They may be two choices of one turn, or of two turns in any two sessions."""

    chosen: ComparedAnswer
    rejected: ComparedAnswer

    @property
    def pair(self) -> tuple[ComparedAnswer, ComparedAnswer]:
        """Both answers in an order that does not depend on which is better."""
        one, other = sorted((self.chosen, self.rejected), key=lambda answer: (answer.turn_id, answer.choice))
        return one, other


def broken(field: str, problem: str) -> PydanticCustomError:
    """The refusal of a feedback that names the field at fault, also where several fields together are at fault."""
    return PydanticCustomError("feedback_rule", "{field}: {problem}", {"field": field, "problem": problem})


class Opinion(Model):
    """Says at most one of `value`, `rating`, `label`, `parts`, `edit` and `preference`.

    The last word of each rater of a source about a target is valid. The rules are those of every door: HTTP, and the
    topic itself.
    """

    source: Text = "feedback"
    rater: Text | None = None
    """Who of the source says it. The value of a source is the mean of its raters' last values."""
    metric: Metric | None = None
    """What is judged. A metric is a source of its own, `source:metric`, with its own weight."""
    level: Level | None = None
    """What it is about: one answer (`choice` of a turn), turns by themselves, the whole run, or all runs of a task.
    None: the session, or the run that `msg_ids` list; some of the turns of a run are meant by themselves."""
    choice: ChoiceIndex | None = None
    """Which answer of the turn is meant. Without it the turn is meant with all of them; an edit is of the first."""
    value: Score | None = None
    rating: Score | None = None
    """A point on `scale`; `value` is then where it lies between the ends, from 0 to 1."""
    scale: tuple[Score, Score] | None = None
    label: Text | None = None
    """A word that the scorer's settings give a value. A label without one is kept, and abstains."""
    parts: dict[Metric, Score] = Field(default_factory=dict, max_length=32)
    """Several metrics at once. Each is revised and withdrawn by itself."""
    comment: LongText | None = None
    edit: Message | None = None
    """What the turn should have answered: text, tool calls, or both."""
    preference: Preference | None = None
    kind: Kind | None = None
    """Only of what is withdrawn: which kind of feedback is. None: the value, or the preference that is named."""
    withdrawn: bool = False

    @property
    def about(self) -> Kind:
        """The kind of feedback that it is, or takes back."""
        if self.preference is not None:
            return "preference"
        return "edit" if self.edit is not None else self.kind or "value"

    @property
    def says(self) -> bool:
        """Whether it judges, so that it does more than to bring context or names, or to take back."""
        forms = self.value, self.label, self.edit, self.preference
        return not self.withdrawn and (bool(self.parts) or any(form is not None for form in forms))

    @property
    def metric_source(self) -> str:
        """The source under which its value counts."""
        return metric_source(self.source, self.metric)

    @model_validator(mode="after")
    def _speaks_in_its_own_name(self) -> Self:
        names = [("source", self.source, True), ("rater", self.rater, False), ("metric", self.metric, False)]
        names += [("parts", name, False) for name in self.parts]
        for field, name, whole_word in names:
            problem = refusal_of(name, whole_word=whole_word) if name else None
            if problem is not None:
                raise broken(field, f"{printable(name or '')!r} {problem}")
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
        given = [name for name, there in forms.items() if there]
        if len(given) > 1:
            raise broken(given[1], f"comes with {given[0]}; one feedback says one of them, send two")
        if self.withdrawn and given and given != ["preference"] and given != ["value"]:
            raise broken(given[0], "a withdrawn feedback says nothing else; leave it out, an edit is named by its kind")
        if self.kind is not None and not self.withdrawn:
            raise broken("kind", "is for what is withdrawn; leave it out, what is given says it")
        if self.kind is not None and given == ["preference"] and self.kind != "preference":
            raise broken("kind", f"is {self.kind}, and a preference is withdrawn")
        if self.kind == "preference" and self.preference is None:
            raise broken("preference", "name the two answers whose comparison is withdrawn")
        return self

    @model_validator(mode="after")
    def _rating_fits_its_scale(self) -> Self:
        if (self.rating is None) != (self.scale is None):
            missing, there = ("scale", "rating") if self.scale is None else ("rating", "scale")
            raise broken(missing, f"is missing; a rating comes with the ends of its scale, and {there} is there alone")
        if self.rating is None or self.scale is None:
            return self
        low, high = self.scale
        if not low < high:
            raise broken("scale", f"[{low:g}, {high:g}] has no room; the lower end comes first")
        if not low <= self.rating <= high:
            raise broken("rating", f"{self.rating:g} is not on the scale from {low:g} to {high:g}")
        normalised = (self.rating - low) / (high - low)
        if self.value is None:
            object.__setattr__(self, "value", normalised)
        elif self.value != normalised:
            raise broken("value", f"is not where the rating lies on its scale ({normalised:g}); leave it out")
        return self

    @model_validator(mode="after")
    def _metric_is_one_of_values(self) -> Self:
        if self.metric is not None and (self.parts or self.about == "edit"):
            raise broken("metric", "is for one value or preference; parts name their metrics, an edit has none")
        longest = max([self.metric or "", *self.parts], key=len)
        if len(metric_source(self.source, longest or None)) > _SOURCE_LENGTH_MAX:
            raise broken("source", f"with the metric it has over {_SOURCE_LENGTH_MAX} characters; shorten it")
        return self

    @model_validator(mode="after")
    def _edit_is_an_answer(self) -> Self:
        edit = self.edit
        if edit is None:
            return self
        if edit.role != "assistant":
            raise broken("edit", f"has the role {edit.role!r}; it is what the assistant should have answered")
        if edit.tool_call_id is not None or not (edit.text or edit.tool_calls):
            raise broken("edit", "has neither text nor tool calls; it is what the assistant should have answered")
        return self

    @model_validator(mode="after")
    def _two_answers(self) -> Self:
        if self.preference is not None and self.preference.chosen == self.preference.rejected:
            raise broken("preference", "compares an answer with itself; name two")
        if self.preference is not None and (self.level not in (None, "response") or self.choice is not None):
            raise broken("preference", "names its answers itself; leave level and choice out")
        return self

    def preference_id(self, tenant: str) -> str:
        """Names what this rater says of this pair, whichever is better: so a changed mind is a revision."""
        assert self.preference is not None
        pair = [part for answer in self.preference.pair for part in (answer.turn_id, answer.choice)]
        return derived_id("preference", tenant, self.source, self.metric or "", self.rater or "", *pair)


def metric_source(source: str, metric: str | None) -> str:
    """A metric of a source is a source: its weight is that of the first pattern that fits, as of any."""
    return source if metric is None else f"{source}:{metric}"


def values_of(opinion: Opinion, labels: Mapping[str, float]) -> Iterator[tuple[str, float | None]]:
    """Yield each source under which an opinion gives a value, with the value; None: withdrawn, or an unknown label."""
    if opinion.withdrawn:
        yield opinion.metric_source, None
    elif opinion.label is not None:
        yield opinion.metric_source, labels.get(opinion.label)
    elif opinion.value is not None:
        yield opinion.metric_source, opinion.value
    for metric, value in opinion.parts.items():
        yield metric_source(opinion.source, metric), value
