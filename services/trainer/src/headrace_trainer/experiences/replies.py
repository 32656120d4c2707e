"""What the user said after an answer, found in the tokens of the branch; and which answers that makes examples of.

A branch holds what the engine was asked with: after an answer its end, the next messages, and the opening of the next
answer. The base's chat template says what a single message of a user looks like there. What has another form (a tool's
result, several messages, what a client rewrote) is no reply. No token is made here (P2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace_runtime.errors import SettingError
from headrace_runtime.versions import TOKENIZER_FILE
from headrace_schemas import Branch, Experience, Span
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.templates import environment, special_tokens, template_of

CONTRADICTED, ACCEPTED = "contradicted/", "accepted/"
"""How the parts of such examples begin."""
_CACHED_MAX = 4096
_OPENING_TOKENS_MAX = 32
_MARK = "\ue000"
_ASKED = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": _MARK}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True, slots=True)
class Reply:
    """Of one answer: its prompt without the opening of an answer, the user's next message with one, and what the model
    answered to that."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    next: Span


@dataclass(frozen=True, slots=True)
class _Form:
    """What stands before and after the content of a message, the opening of an answer included."""

    before: str
    after: str

    def holds(self, text: str) -> bool:
        longer = len(text) > len(self.before) + len(self.after)
        return longer and text.startswith(self.before) and text.endswith(self.after)


class ReplyReader:
    """Reads a model folder once. `contradicted_max` and `accepted_min` are bounds on the reward of a turn;
    `earlier_max` is how many answers before a contradicted one are looked for.

    Raises `SettingError` when the folder has no tokenizer, or no chat template that shows where messages begin and end.
    """

    def __init__(self, folder: Path, contradicted_max: float, accepted_min: float, earlier_max: int = 0) -> None:
        from tokenizers import Tokenizer

        template = template_of(folder)
        if template is None or not (folder / TOKENIZER_FILE).is_file():
            raise SettingError("trainer.base", str(folder), f"replies need its chat template and {TOKENIZER_FILE}")
        self._bounds = contradicted_max, accepted_min
        self._earlier_max = earlier_max
        self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._names = special_tokens(folder)
        self._template = environment().from_string(template)
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = frozenset(number for number, one in added.items() if one.special)
        plain, answered = self._render([_ASKED]), self._render([_ASKED, _ANSWER])
        asking = self._render([_ASKED], opens=True)
        user = self._form([_ASKED, _ANSWER], {"role": "user", "content": _MARK})
        if user is None or not user.before or plain is None or answered is None or not str(asking).startswith(plain):
            remedy = "its chat template does not show where a user's message begins and ends; replies need that"
            raise SettingError("trainer.base", str(folder), remedy)
        self._user = user
        self._tool = self._form([_ASKED, _CALLED], {"role": "tool", "tool_call_id": "1", "content": _MARK})
        self._opening = str(asking)[len(plain) :]
        self._closing = answered.partition(_MARK)[2]
        self._cached = lru_cache(_CACHED_MAX)(self._places)

    def examples(self, experience: Experience) -> Iterator[Example]:
        """Contradicted answers, and accepted ones with the value 0. Calls that a tool answered are neither."""
        branch, (contradicted_max, accepted_min) = experience.branch, self._bounds
        rewards = {one.turn_id: one.value for one in experience.turn_rewards}
        if branch is None or experience.origin != "sampled":
            return
        for span in branch.spans:
            reward, name = rewards.get(span.turn_id), f"{span.turn_id}/{span.choice}"
            if reward is None or contradicted_max < reward < accepted_min:
                continue
            found = self.read(branch, span)
            if reward >= accepted_min and (found is not None or span is branch.spans[-1]):
                yield Example(f"{ACCEPTED}{name}", 0.0, "", span.turn_id, span.choice)
            if found is not None and reward <= contradicted_max:
                longest = max(len(span.logprobs), len(found.next.logprobs))
                longest += len(found.prompt) + len(found.reply)
                yield Example(f"{CONTRADICTED}{name}", 1.0, "", span.turn_id, span.choice, (), longest)

    def read(self, branch: Branch, span: Span) -> Reply | None:
        """What the user said after the answer `span`; None where no message of a user, or no answer to one,
        follows."""
        place = branch.spans.index(span) + 1
        if place == len(branch.spans):
            return None
        following, ids = branch.spans[place], branch.token_ids
        found = self._cached(
            tuple(ids[max(0, span.start - _OPENING_TOKENS_MAX) : span.start]), tuple(ids[span.stop : following.start])
        )
        if found is None:
            return None
        opening, closing = found
        prompt, reply = ids[: span.start - opening], ids[span.stop + closing : following.start]
        return Reply(tuple(prompt), tuple(reply), following) if prompt else None

    def earlier(self, branch: Branch, span: Span) -> tuple[Span, ...]:
        """The last answers before `span`, in order, since the user spoke before it."""
        found: list[Span] = []
        for one in reversed(branch.spans[: branch.spans.index(span)]):
            if len(found) == self._earlier_max or self.read(branch, one) is not None:
                break
            found.append(one)
        return tuple(reversed(found))

    def _places(self, asked: tuple[int, ...], between: tuple[int, ...]) -> tuple[int, int] | None:
        """Tokens of the opening that `asked` ends with, and of the end of an answer that `between` begins with."""
        lengths = range(len(asked) + 1)
        opening = next((n for n in lengths if self._text(asked[len(asked) - n :]) == self._opening), None)
        text = self._text(between)
        closing_text = text[: max(0, text.find(self._user.before))]
        if opening is None or not self._closing.endswith(closing_text):
            return None
        closing = next((n for n in range(len(between)) if self._text(between[:n]) == closing_text), None)
        if closing is None:
            return None
        message = text[len(closing_text) :]
        whole = self._text(between[closing:]) == message and self._user.holds(message)
        if not whole or (self._tool is not None and self._tool != self._user and self._tool.holds(message)):
            return None
        return (opening, closing) if self._single(between[closing:]) else None

    def _single(self, message: tuple[int, ...]) -> bool:
        """No control token but those of the form: else it is several messages."""
        form = self._tokenizer.encode(f"{self._user.before}x{self._user.after}", add_special_tokens=False).ids
        return [one for one in message if one in self._controls] == [one for one in form if one in self._controls]

    def _form(self, messages: list[Any], last: Any) -> _Form | None:
        before, after = self._render(messages), self._render([*messages, last], opens=True)
        if before is None or after is None or not after.startswith(before):
            return None
        head, mark, tail = after[len(before) :].partition(_MARK)
        return _Form(head, tail) if mark else None

    def _render(self, messages: list[Any], *, opens: bool = False) -> str | None:
        try:
            return self._template.render(messages=messages, add_generation_prompt=opens, **self._names)
        except Exception:  # noqa: BLE001 - a template may raise whatever its expressions raise
            return None

    def _text(self, ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""
