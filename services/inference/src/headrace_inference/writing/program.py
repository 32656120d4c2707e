"""Filter that tokenizes written conversations (`headrace_schemas.programs.models`). It uses no weights and no bus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace_inference.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.errors import VersionUnusable
from headrace_inference.settings import InferenceSettings
from headrace_inference.writing.tokens import ConversationWriter, Unwritable
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import versions
from headrace_schemas.programs.models import BaseLine, OpenedLine, RefusedLine, RowLine, WrittenLine
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from headrace_schemas.values.text import read_user_text

_PLACEHOLDER = Fingerprint(token_ids=(0, 0), logprobs=(0.0,))
_UNBOUNDED = 1 << 30


async def run(_common: Common, settings: InferenceSettings) -> None:
    """Run the filter on standard input and output. Raises `VersionUnusable` if the base has no usable tokenizer."""
    lines = Lines()
    writer: ConversationWriter | None = None
    async for word, value in lines.read():
        if word == "base":
            writer = open_writer(BaseLine.model_validate_json(value), settings)
            lines.write("opened", OpenedLine(tokens_max=writer.tokens_max).model_dump_json().encode())
            lines.flush()
            continue
        if writer is None:
            raise ValueError(f"a line begins with {word!r}, but the first line must begin with 'base'")
        answer = write_row(writer, RowLine.model_validate_json(value))
        lines.write("refused" if isinstance(answer, RefusedLine) else "written", answer.model_dump_json().encode())
    lines.flush()


def open_writer(line: BaseLine, settings: InferenceSettings) -> ConversationWriter:
    """Return a writer with the tokenizer of a folder. Raises `VersionUnusable`."""
    folder = Path(line.folder)
    for name in (versions.TOKENIZER_FILE, "config.json"):
        if not (folder / name).is_file():
            raise VersionUnusable(f"{folder} has no {name}; name a Hugging Face folder with a fast tokenizer")
    parsers = Parsers(TOOL_PARSERS.get(settings.tool_parser), REASONING_PARSERS.get(settings.reasoning_parser))
    context = _context(folder)
    return ConversationWriter(
        ChatTokenizer(folder, _manifest(folder)), parsers, min(context, line.tokens_max or context)
    )


def write_row(writer: ConversationWriter, row: RowLine) -> WrittenLine | RefusedLine:
    """Return the tokens of a row, or the reason why it cannot be tokenized."""
    try:
        answers = tuple(
            writer.write(row.prompt, answer, row.tools, frozenset(row.untrained), shown=row.shown)
            for answer in row.answers
        )
    except Unwritable as error:
        return RefusedLine(number=row.number, kind=error.kind, reason=str(error))
    return WrittenLine(number=row.number, answers=answers)


def _manifest(folder: Path) -> Manifest:
    """Return a manifest for the check of the tokenizer. It has no weights, and its fingerprint is a placeholder."""
    paths = [path for path in versions.model_files(folder) if not versions.is_weights(path.name)]
    files = [(path.relative_to(folder).as_posix(), versions.file_digest(path), path.stat().st_size) for path in paths]
    return Manifest(
        name="base",
        lineage="written",
        step=0,
        files=tuple(File(path=name, blob=BlobRef(uri="none", sha256=sha, size=size)) for name, sha, size in files),
        fingerprint=_PLACEHOLDER,
        tokenizer_sha256=versions.file_digest(folder / versions.TOKENIZER_FILE),
        template_sha256=versions.template_digest(folder),
    )


def _context(folder: Path) -> int:
    """Return the context length in the model's configuration."""
    try:
        config: Any = json.loads(read_user_text(folder / "config.json"))
        text = config.get("text_config") or config
        return int(text.get("max_position_embeddings") or _UNBOUNDED)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise VersionUnusable(f"{folder}: its config.json cannot be read: {error}") from None
