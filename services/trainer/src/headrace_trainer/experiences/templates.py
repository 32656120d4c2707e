"""A base's chat template and the texts of its special tokens, read without transformers."""

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

from headrace_runtime.versions import TEMPLATE_FILE
from headrace_schemas.user_text import read_user_text

_TOKENIZER_CONFIG = "tokenizer_config.json"


def read_json(path: Path) -> Any:
    """None where it cannot be read."""
    try:
        return json.loads(read_user_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def template_of(folder: Path) -> str | None:
    """The file of that name, else what older folders have in the tokenizer's configuration: a text, or named ones."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return read_user_text(path)
    config = read_json(folder / _TOKENIZER_CONFIG)
    given = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(given, list):
        named = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """By the names that templates know them by."""
    config = read_json(folder / _TOKENIZER_CONFIG)
    found = {}
    for name, value in (config if isinstance(config, dict) else {}).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what an assistant said; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face's own renders chat templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 (local, as there)
    return made


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
