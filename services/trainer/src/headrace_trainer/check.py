"""Checks the trainer's settings before a start, without torch: the base folder, its tokenizer and its chat template.

Where the base is small, the back end's own check runs as well (`torch` compares its logprobs with the model's own).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from jinja2 import TemplateError
from pydantic import JsonValue

from headrace_runtime.errors import SettingError, is_panic
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import base_files, base_models
from headrace_runtime.storage.model_folder import find_folder_problems, find_irregular_files
from headrace_runtime.storage.versions import TEMPLATE_FILE, TOKENIZER_FILE
from headrace_trainer.backends import BACKENDS
from headrace_trainer.experiences.admission import open_reply_reader
from headrace_trainer.experiences.templates import environment, read_json, read_template, special_tokens
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.sizes import describe_sizes, matrix_names, suggest_settings

log = get_logger(__name__)
_CONFIG = "config.json"
_COMPARED_BYTES_MAX = 256 << 20
"""Largest base whose weights are loaded for the check. Of larger bases only names and shapes are read."""
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


async def check(common: Common, settings: TrainerSettings) -> list[str]:
    """Check `trainer.base` before a start, and return its problems as messages.

    If the trainer must first download the base from the hub, only the names of its files are checked; if it must first
    convert a GGUF file, only that the file exists.

    Raises:
        SettingError: the logprobs differ, or replies are trained and the chat template does not mark where messages
            begin.
    """
    folder = await asyncio.to_thread(_find_folder, settings.base, common.data_dir)
    if folder is None:
        return []
    settings = settings.model_copy(update={"base": str(folder)})
    problems = await asyncio.to_thread(lambda: list(_problems(folder)))
    if not problems:
        await asyncio.to_thread(_check_targets, folder, settings)
    if not problems and settings.advantage.signals.replies:
        await asyncio.to_thread(open_reply_reader, settings)
    backend = BACKENDS.get(settings.backend)
    is_small = _weights_bytes(folder) <= _COMPARED_BYTES_MAX
    if not problems and is_small and backend.check:
        await asyncio.to_thread(backend.check, settings)
    elif not problems and not is_small and backend.check_layout:
        await asyncio.to_thread(backend.check_layout, settings)
    return [_setting_message(folder, problem) for problem in problems]


def notes(common: Common, settings: TrainerSettings) -> list[str]:
    """Return sentences about the memory, disk space and computation of the training, for the output of the check."""
    folder = _find_folder(settings.base, common.data_dir)
    if folder is None:
        return ["the base is fetched or converted at the first start; its sizes are known after that"]
    return list(describe_sizes(folder, settings))


def suggest(common: Common, settings: TrainerSettings) -> dict[str, JsonValue]:
    """Suggest values of settings that depend on the size of the base model; empty if the model is not downloaded or
    converted yet.
    """
    folder = _find_folder(settings.base, common.data_dir, check_hub=False)
    return suggest_settings(folder, settings) if folder is not None else {}


def _find_folder(base: str, data_dir: Path, *, check_hub: bool = True) -> Path | None:
    """Return the folder of the base, or None if the trainer's start will fetch or convert it. Blocks.

    Args:
        check_hub: whether to check that the hub has a model that was not fetched. Otherwise no connection is made.
    """
    path = Path(base) if Path(base).is_dir() else base_files.find_file(base)
    if path is not None:
        return path if path.is_dir() else base_files.find_converted(path, data_dir)
    repository = base_models.Repository.parse(base)
    if repository is None:
        return Path(base)
    fetched = base_models.find_fetched(repository, data_dir)
    if fetched is None and check_hub:
        base_models.describe(repository)
    return fetched


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())


def _setting_message(folder: Path, remedy: str) -> str:
    return str(SettingError("trainer.base", str(folder), remedy))


def _problems(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"is not a folder; {base_models.FORMS}"
        return
    if irregular := list(find_irregular_files(folder)):
        yield from irregular  # reading such a file may never end
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


def _check_targets(folder: Path, settings: TrainerSettings) -> None:
    """Raise `SettingError` if adapters are trained and the base has none of the modules in `trainer.lora.targets`."""
    lora = settings.lora
    if not lora.rank:
        return
    names = matrix_names(folder)
    if names and names.isdisjoint(lora.targets):
        remedy = f"the base has no module of these names; set names out of {', '.join(sorted(names))}"
        raise SettingError("trainer.lora.targets", ", ".join(lora.targets), remedy)


def _tokenizer_trouble(path: Path) -> str | None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises plain `Exception`
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return str(error)
    return None


def _template_problems(folder: Path) -> Iterator[str]:
    try:
        template_text = read_template(folder)
    except ValueError:
        return  # `find_folder_problems` names its encoding
    if template_text is None:
        yield f"has no chat template; save one as {TEMPLATE_FILE}"
        return
    tokens = special_tokens(folder)
    try:
        template = environment().from_string(template_text)
    except TemplateError as error:
        yield f"its chat template is not valid: {error}"
        return
    for content, messages, tools in (
        ("messages", _MESSAGES, None),
        ("tools", _MESSAGES, _TOOLS),
        ("a tool call and its result", _TOOL_CALL, _TOOLS),
    ):
        try:
            text = template.render(messages=messages, tools=tools, add_generation_prompt=True, **tokens)
        except Exception as error:  # noqa: BLE001 - a template may raise whatever its expressions raise
            yield f"its chat template does not take {content}: {type(error).__name__}: {error}"
            return
        if content == "tools" and "weather" not in text:
            log.warning(
                "template_drops_tools", base=str(folder), remedy="agents with tools need a template that names them"
            )
        if content == "messages" and "tomorrow" not in text:
            yield "its chat template leaves out what the user says"
