"""Finds the user's reply to an answer in the tokens of a branch, and the examples that follow from it.

A branch holds the prompt of each answer as the engine received it: after an answer come its end, the next messages, and
the opening of the next answer. The base's chat template defines the form of a single message of a user. Tokens of
another form (a tool's result, several messages, a message that a client rewrote) are no reply. No token is created
here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace_runtime.errors import SettingError
from headrace_runtime.storage.versions import TOKENIZER_FILE
from headrace_schemas import Branch, Experience, Span
from headrace_schemas.values.bounds import SCORE_MAX
from headrace_trainer.algorithms.estimators import Reply
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.templates import environment, load_tokenizer, read_template, special_tokens

CONTRADICTED, ACCEPTED = "contradicted/", "accepted/"
"""Prefixes of the parts of examples that a teacher grades."""
GRADED = "replied/"
"""Prefix of the parts of examples that an algorithm grades by their replies."""
GradeReplies = Callable[[Sequence[Reply]], Sequence[float | None]]
_CACHED_MAX = 4096
_OPENING_TOKENS_MAX = 32
_CLOSING_TOKENS_MAX = 32
"""Bounds of the tokens that a chat template writes before an answer, and after it."""
_MARK = "\ue000"
_USER_MESSAGE = {"role": "user", "content": "x"}
_ANSWER_MESSAGE = {"role": "assistant", "content": _MARK}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALL_MESSAGE = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """Tokens around a user's reply to an answer: the answer's prompt, the reply, and the span of the next answer.

    `prompt` is without the template's tokens that open the answer; `reply` ends with those that open the next answer.
    """

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    text: str
    """The user's message, without the chat template's text around it."""
    next_span: Span


@dataclass(frozen=True, slots=True)
class _MessageForm:
    """Text that the chat template writes before and after the content of a user message and up to the next answer."""

    before: str
    after: str

    def matches(self, text: str) -> bool:
        longer = len(text) > len(self.before) + len(self.after)
        return longer and text.startswith(self.before) and text.endswith(self.after)

    def content_of(self, text: str) -> str:
        return text.removeprefix(self.before).removesuffix(self.after)


class ReplyReader:
    """Finder of users' replies in the tokens of branches, by the tokenizer and the chat template of a model folder.

    Args:
        folder: the model folder. It is read once.
        contradicted_max: highest reward of a turn whose answer counts as contradicted.
        accepted_min: lowest reward of a turn whose answer counts as accepted.
        earlier_max: largest number of answers before a contradicted one that `earlier_answers` returns.

    Raises:
        SettingError: the folder has no tokenizer, or its chat template does not show where messages begin and end.
    """

    def __init__(self, folder: Path, contradicted_max: float, accepted_min: float, earlier_max: int = 0) -> None:
        template = read_template(folder)
        if template is None or not (folder / TOKENIZER_FILE).is_file():
            raise SettingError("trainer.base", str(folder), f"replies need its chat template and {TOKENIZER_FILE}")
        self._bounds = contradicted_max, accepted_min
        self._earlier_max = earlier_max
        self._tokenizer = load_tokenizer(folder)
        self._names = special_tokens(folder)
        self._template = environment().from_string(template)
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = frozenset(token_id for token_id, token in added.items() if token.special)
        plain, answered = self._render([_USER_MESSAGE]), self._render([_USER_MESSAGE, _ANSWER_MESSAGE])
        opened_prompt = self._render([_USER_MESSAGE], opens=True)
        user = self._form([_USER_MESSAGE, _ANSWER_MESSAGE], {"role": "user", "content": _MARK})
        if (
            user is None
            or not user.before
            or plain is None
            or answered is None
            or not str(opened_prompt).startswith(plain)
        ):
            remedy = "its chat template does not show where a user's message begins and ends; replies need that"
            raise SettingError("trainer.base", str(folder), remedy)
        self._user = user
        self._tool = self._form([_USER_MESSAGE, _CALL_MESSAGE], {"role": "tool", "tool_call_id": "1", "content": _MARK})
        self._opening = str(opened_prompt)[len(plain) :]
        self._closing = answered.partition(_MARK)[2]
        self._cached = lru_cache(_CACHED_MAX)(self._find_boundaries)

    def examples(self, experience: Experience) -> Iterator[Example]:
        """Yield the examples of answers with a reply: contradicted ones with the value 1, and accepted ones with 0.

        Answers to which a tool replied are skipped, and answers that were sampled from a part of the vocabulary,
        because after the prompt with the reply other tokens would be allowed.
        """
        branch, (contradicted_max, accepted_min) = experience.branch, self._bounds
        rewards = {reward.turn_id: reward.value for reward in experience.turn_rewards}
        if branch is None or experience.origin != "sampled":
            return
        for span in branch.spans:
            reward, name = rewards.get(span.turn_id), f"{span.turn_id}/{span.choice}"
            if reward is None or contradicted_max < reward < accepted_min or span.restricted:
                continue
            reply = self.read_reply(branch, span)
            if reply is not None and reply.next_span.restricted:
                continue
            if reward >= accepted_min and (reply is not None or span is branch.spans[-1]):
                yield Example(f"{ACCEPTED}{name}", 0.0, "", span.turn_id, span.choice)
            if reply is not None and reward <= contradicted_max:
                longest = max(len(span.logprobs), len(reply.next_span.logprobs))
                longest += len(reply.prompt) + len(reply.reply)
                yield Example(f"{CONTRADICTED}{name}", 1.0, "", span.turn_id, span.choice, (), longest)

    def graded_examples(self, experience: Experience, grade: GradeReplies) -> Iterator[Example]:
        """Yield the sampled answers with a reply to which `grade` gives a value.

        Raises:
            ValueError: `grade` returned another number of values than there are replies, or a value that is no reward.
        """
        replies = self.find_replies(experience)
        grades = grade(replies) if replies else ()
        if len(grades) != len(replies):
            raise ValueError(f"grade returned {len(grades)} values for {len(replies)} replies; return one value each")
        for reply, value in zip(replies, grades, strict=True):
            if value is None:
                continue
            if not abs(value) <= SCORE_MAX:
                raise ValueError(f"grade returned {value}; return a number between -{SCORE_MAX:g} and {SCORE_MAX:g}")
            part = f"{GRADED}{reply.turn_id}/{reply.choice}"
            yield Example(part, None, "", reply.turn_id, reply.choice, grade=float(value), reply=reply)

    def find_replies(self, experience: Experience) -> list[Reply]:
        """Return the user's replies to the sampled answers of an experience, in their order."""
        branch, rewards = experience.branch, {reward.turn_id: reward.value for reward in experience.turn_rewards}
        if branch is None or experience.origin != "sampled":
            return []
        replies = []
        for span in branch.spans:
            tokens = self.read_reply(branch, span)
            if tokens is None:
                continue
            answer_ids = branch.token_ids[span.start : span.stop]
            reply = Reply(
                turn_id=span.turn_id,
                choice=span.choice,
                answer=str(self._tokenizer.decode(list(answer_ids), skip_special_tokens=True)),
                answer_ids=answer_ids,
                text=tokens.text,
                token_ids=tokens.reply,
                turn_reward=rewards.get(span.turn_id),
            )
            replies.append(reply)
        return replies

    def read_reply(self, branch: Branch, span: Span) -> ReplyTokens | None:
        """Return the user's reply to the answer `span`. None if no user message follows it, or no answer follows
        that."""
        index = _index_of(branch, span) + 1
        if index == len(branch.spans):
            return None
        following, ids = branch.spans[index], branch.token_ids
        boundaries = self._cached(
            tuple(ids[max(0, span.start - _OPENING_TOKENS_MAX) : span.start]), tuple(ids[span.stop : following.start])
        )
        if boundaries is None:
            return None
        opening, closing, text = boundaries
        prompt, reply = ids[: span.start - opening], ids[span.stop + closing : following.start]
        return ReplyTokens(tuple(prompt), tuple(reply), text, following) if prompt else None

    def earlier_answers(self, branch: Branch, span: Span) -> tuple[Span, ...]:
        """Return the spans of the model's answers (at most `earlier_max`) between the user's previous message and the
        answer `span`, in order. The user's reply to `span` may be about one of them.
        """
        spans: list[Span] = []
        for earlier in reversed(branch.spans[: _index_of(branch, span)]):
            if len(spans) == self._earlier_max or self.read_reply(branch, earlier) is not None:
                break
            spans.append(earlier)
        return tuple(reversed(spans))

    def _find_boundaries(self, prompt_end: tuple[int, ...], between: tuple[int, ...]) -> tuple[int, int, str] | None:
        """Find the user's message in the tokens between two answers of the model.

        Args:
            prompt_end: the last tokens before the first answer.
            between: the tokens between the two answers.

        Returns:
            The number of the template's tokens that open an answer, at the end of the prompt; the number of those that
            close it; and the text of the message. None without such a message.
        """
        lengths = range(len(prompt_end) + 1)
        opening = next((n for n in lengths if self._text(prompt_end[len(prompt_end) - n :]) == self._opening), None)
        text = self._text(between)
        closing_text = text[: max(0, text.find(self._user.before))]
        if opening is None or not self._closing.endswith(closing_text):
            return None
        closing_lengths = range(min(len(between), _CLOSING_TOKENS_MAX + 1))
        closing = next((n for n in closing_lengths if self._text(between[:n]) == closing_text), None)
        if closing is None:
            return None
        message = text[len(closing_text) :]
        valid = self._text(between[closing:]) == message and self._user.matches(message)
        if not valid or (self._tool is not None and self._tool != self._user and self._tool.matches(message)):
            return None
        is_single = self._is_single_message(between[closing:])
        return (opening, closing, self._user.content_of(message)) if is_single else None

    def _is_single_message(self, message: tuple[int, ...]) -> bool:
        """Return whether the tokens are a single user message, by comparing their control tokens with a rendered
        one."""
        form = self._tokenizer.encode(f"{self._user.before}x{self._user.after}", add_special_tokens=False).ids
        return [token for token in message if token in self._controls] == [
            token for token in form if token in self._controls
        ]

    def _form(self, messages: list[Any], last: Any) -> _MessageForm | None:
        before, after = self._render(messages), self._render([*messages, last], opens=True)
        if before is None or after is None or not after.startswith(before):
            return None
        head, mark, tail = after[len(before) :].partition(_MARK)
        return _MessageForm(head, tail) if mark else None

    def _render(self, messages: list[Any], *, opens: bool = False) -> str | None:
        try:
            return self._template.render(messages=messages, add_generation_prompt=opens, **self._names)
        except Exception:  # noqa: BLE001 - a template may raise whatever its expressions raise
            return None

    def _text(self, ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""


def _index_of(branch: Branch, span: Span) -> int:
    """Return the index of `span` among the spans of the branch, by binary search."""
    return bisect_left(branch.spans, span.start, key=lambda other: other.start)
