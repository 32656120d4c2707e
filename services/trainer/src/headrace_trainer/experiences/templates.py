"""Reads a base's chat template and the texts of its special tokens without transformers."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_runtime.storage.versions import TEMPLATE_FILE
from headrace_schemas.values.text import read_user_text

_TOKENIZER_CONFIG = "tokenizer_config.json"


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
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
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


class _Generation(Extension):
    """`{% generation %}`, by which templates mark the assistant's text; it changes no output."""

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
