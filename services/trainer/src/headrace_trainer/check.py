"""What would stop the trainer's start: the base folder, its tokenizer and its chat template, found without torch; and,
where the base is small, what the back end finds (`torch`: whether we compute what the model computes)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from jinja2 import TemplateError

from headrace_runtime.errors import SettingError
from headrace_runtime.logs import get_logger
from headrace_runtime.model_folder import find_folder_problems
from headrace_runtime.settings import Common
from headrace_runtime.versions import TEMPLATE_FILE, TOKENIZER_FILE
from headrace_trainer.backends import BACKENDS
from headrace_trainer.experiences.templates import environment, read_json, special_tokens, template_of
from headrace_trainer.settings import TrainerSettings

log = get_logger(__name__)
_CONFIG = "config.json"
_COMPARED_BYTES_MAX = 256 << 20
"""Weights of bases that are loaded to be examined. Of larger ones the names and shapes are; the start reads them."""
_MESSAGES = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "And tomorrow?"},
]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
_TOOL_CALL = [
    _MESSAGES[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Paris"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "name": "weather", "content": "sunny"},
]


async def check(_common: Common, settings: TrainerSettings) -> list[str]:
    """Everything that is wrong with `trainer.base`, as `SettingError` says it. Raises one where the logprobs differ."""
    folder = Path(settings.base)
    found = await asyncio.to_thread(lambda: list(_problems(folder)))
    backend = BACKENDS.get(settings.backend)
    is_small = _weights_bytes(folder) <= _COMPARED_BYTES_MAX
    if not found and is_small and backend.check:
        await asyncio.to_thread(backend.check, settings)
    elif not found and not is_small and backend.check_layout:
        await asyncio.to_thread(backend.check_layout, settings)
    return [_said(folder, remedy) for remedy in found]


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _said(folder: Path, remedy: str) -> str:
    return str(SettingError("trainer.base", str(folder), remedy))


def _problems(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield "is not a folder; name one in Hugging Face's layout"
        return
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        yield "has no weights in safetensors; convert the model first"
    yield from find_folder_problems(folder)
    if not isinstance(read_json(folder / _CONFIG), dict):
        yield f"has no {_CONFIG} that can be read; convert the model first"
    if not (folder / TOKENIZER_FILE).exists():
        yield f"has no {TOKENIZER_FILE}; save a fast tokenizer there"
    elif (why := _tokenizer_trouble(folder / TOKENIZER_FILE)) is not None:
        yield f"{TOKENIZER_FILE} cannot be used: {why}"
    yield from _template_problems(folder)


def _tokenizer_trouble(path: Path) -> str | None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain `Exception`
        return str(error)
    return None


def _template_problems(folder: Path) -> Iterator[str]:
    try:
        found = template_of(folder)
    except ValueError:
        return  # `find_folder_problems` names its encoding
    if found is None:
        yield f"has no chat template; save one as {TEMPLATE_FILE}"
        return
    tokens = special_tokens(folder)
    try:
        template = environment().from_string(found)
    except TemplateError as error:
        yield f"its chat template is not valid: {error}"
        return
    for what, messages, tools in (
        ("messages", _MESSAGES, None),
        ("tools", _MESSAGES, _TOOLS),
        ("a tool call and its result", _TOOL_CALL, _TOOLS),
    ):
        try:
            text = template.render(messages=messages, tools=tools, add_generation_prompt=True, **tokens)
        except Exception as error:  # noqa: BLE001 - a template may raise whatever its expressions raise
            yield f"its chat template does not take {what}: {type(error).__name__}: {error}"
            return
        if what == "tools" and "weather" not in text:
            log.warning(
                "template_drops_tools", base=str(folder), remedy="agents with tools need a template that names them"
            )
        if what == "messages" and "tomorrow" not in text:
            yield "its chat template leaves out what the user says"
