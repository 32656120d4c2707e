"""Renders a base's chat template without transformers, and tokenizes an answer that a person wrote, as the model would
have sampled it.

The base's chat template is rendered once with a user's message and the answer, and once with the user's message and the
opening of an answer. The text that the first has after the second is the answer's text, and is tokenized by itself. The
prompt keeps the tokens that the engine received.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_runtime.chat_messages import template_message
from headrace_runtime.errors import SettingError
from headrace_runtime.storage.versions import TEMPLATE_FILE, TOKENIZER_FILE
from headrace_schemas.events.chat import Message
from headrace_schemas.values.text import read_user_text

_TOKENIZER_CONFIG = "tokenizer_config.json"
_CACHED_MAX = 1024
_USER_MESSAGE = Message(role="user", content="x").model_dump(include={"role", "content"})
_TAG = re.compile(r"</?\w+>")
"""Tags of calls and reasoning. In an answer they have their usual meaning."""


def read_json(path: Path) -> Any:
    """Return the JSON value of a file, or None where it cannot be read."""
    try:
        return json.loads(read_user_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def read_template(folder: Path) -> str | None:
    """Return the chat template of a model folder, None where it has none.

    The template is a file, or in older folders a text or a list of named texts in the tokenizer's configuration.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return read_user_text(path)
    config = read_json(folder / _TOKENIZER_CONFIG)
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens by the names that templates use for them."""
    config = read_json(folder / _TOKENIZER_CONFIG)
    tokens = {}
    for name, value in (config if isinstance(config, dict) else {}).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in `folder`, without the truncation and padding that its file may request."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _Generation(Extension):
    """Jinja extension for `{% generation %}`, by which templates mark the assistant's text. It changes no output."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return a jinja2 environment with the options and functions of Hugging Face's chat template renderer."""
    renderer = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    renderer.filters["tojson"] = _to_json
    renderer.globals["raise_exception"] = _raise
    renderer.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 (local, as there)
    return renderer


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class EditWriter:
    """Function object that tokenizes an edited answer, with the tokenizer and the chat template of a model folder.

    The result has the tokens that the model would have sampled for this answer.

    Raises:
        SettingError: the folder has no tokenizer or no chat template.
    """

    def __init__(self, folder: Path) -> None:
        template = read_template(folder)
        if template is None or not (folder / TOKENIZER_FILE).is_file():
            raise SettingError("trainer.base", str(folder), f"edits need its chat template and {TOKENIZER_FILE}")
        self._tokenizer = load_tokenizer(folder)
        self._template = environment().from_string(template)
        self._names = special_tokens(folder)
        self._stops = self._stop_ids(folder)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._controls = tuple(token.content for token in added if token.special and not _TAG.fullmatch(token.content))
        self._cached = lru_cache(_CACHED_MAX)(self._write_answer)

    def __call__(self, message: Message) -> tuple[int, ...] | None:
        """Return the tokens of an edited answer with its end token, or None if the model cannot produce this answer.

        That is so if the chat template renders the answer differently than after its opening, or if the text of the
        answer contains a control token.
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
        """Return the ids of all tokens that end an answer, according to the tokenizer and the model's configuration."""
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
