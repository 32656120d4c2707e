"""The chat template as transformers runs it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from email_agent.tools import DEFINITIONS
from example_parts.base_model import TEMPLATE


def render(
    messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = DEFINITIONS, generate: bool = False
) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(messages=messages, tools=tools, add_generation_prompt=generate)
