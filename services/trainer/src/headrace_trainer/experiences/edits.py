"""Tokenizes an answer that a person wrote, as the model would have sampled it after its prompt.

The base's chat template is rendered once with a user's message and the answer, and once with the user's message and the
opening of an answer. The text that the first has after the second is the answer's text, and is tokenized by itself. The
prompt keeps the tokens that the engine received (P2).
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace_runtime.chat_messages import template_message
from headrace_runtime.errors import SettingError
from headrace_runtime.storage.versions import TOKENIZER_FILE
from headrace_schemas.events.chat import Message
from headrace_trainer.experiences.templates import environment, read_json, read_template, special_tokens

_CACHED_MAX = 1024
_USER_MESSAGE = Message(role="user", content="x").model_dump(include={"role", "content"})
_TAG = re.compile(r"</?\w+>")
"""Tags of calls and reasoning. In an answer they have their usual meaning."""


class EditWriter:
    """Writes the tokens of edits with the tokenizer and the chat template of a model folder.

    Raises:
        SettingError: The folder has no tokenizer or no chat template.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        template = read_template(folder)
        if template is None or not (folder / TOKENIZER_FILE).is_file():
            raise SettingError("trainer.base", str(folder), f"edits need its chat template and {TOKENIZER_FILE}")
        self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._template = environment().from_string(template)
        self._names = special_tokens(folder)
        self._stops = self._stop_ids(folder)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._controls = tuple(token.content for token in added if token.special and not _TAG.fullmatch(token.content))
        self._cached = lru_cache(_CACHED_MAX)(self._write_answer)

    def __call__(self, message: Message) -> tuple[int, ...] | None:
        """Return the tokens of an answer with its end token, None where the answer cannot be written.

        The template may not end such an answer after the opening of one, or the answer may spell out a control token:
        as text it would be another answer, and as a token it would end the turn or begin another one.
        """
        return self._cached(message)

    def _write_answer(self, message: Message) -> tuple[int, ...] | None:
        answer = template_message(message.model_copy(update={"role": "assistant", "name": None, "tool_call_id": None}))
        if any(control in text for text in _texts(answer) for control in self._controls):
            return None
        try:
            opening = self._template.render(messages=[_USER_MESSAGE], add_generation_prompt=True, **self._names)
            conversation = self._template.render(
                messages=[_USER_MESSAGE, answer], add_generation_prompt=False, **self._names
            )
        except Exception:  # noqa: BLE001 - a template may raise whatever its expressions raise
            return None
        if not conversation.startswith(opening):
            return None
        ids: list[int] = self._tokenizer.encode(conversation[len(opening) :], add_special_tokens=False).ids
        end = next((index for index, token in enumerate(ids) if token in self._stops), None)
        return None if end is None else tuple(ids[: end + 1])

    def _stop_ids(self, folder: Path) -> frozenset[int]:
        """Return every token that ends an answer: the tokenizer's, and those of the model's configuration."""
        eos = self._tokenizer.token_to_id(self._names.get("eos_token", ""))
        stop_ids = set() if eos is None else {eos}
        for name in ("generation_config.json", "config.json"):
            config = read_json(folder / name)
            value = config.get("eos_token_id") if isinstance(config, dict) else None
            stop_ids.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
        return frozenset(stop_ids)


def _texts(value: Any) -> list[str]:
    """Return every string in `value`, at any depth."""
    if isinstance(value, str):
        return [value]
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in inner for text in _texts(item)]
