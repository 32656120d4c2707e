"""Finds what is wrong with the files of a model's folder, without torch: for the trainer's check and for adoption.

What only a loaded model shows, missing, unexpected and mismatched tensors and weights that are not finite, is found
where the model is loaded (`headrace_trainer.torch_learner`, `headrace_inference.torch_engine.loader`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_runtime.versions import TOKENIZER_FILE
from headrace_schemas.user_text import read_user_text

_HEADER_BYTES_MAX = 100_000_000
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SHOWN_LENGTH = 60


def find_folder_problems(folder: Path) -> Iterator[str]:
    """Yield each problem with its remedy: broken or missing files of weights, and token ids that do not go together."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            shapes |= _tensor_shapes(path)
        except (OSError, ValueError, struct.error, KeyError, TypeError, IndexError, AttributeError) as error:
            yield f"{path.name} is no safetensors file: {error}; copy it again"
    index = _read_json(folder / "model.safetensors.index.json")
    shards = index.get("weight_map") if isinstance(index, dict) else None
    for name in sorted(set(shards.values())) if isinstance(shards, dict) else ():
        if not (folder / str(name)).is_file():
            yield f"its index names {str(name)[:_SHOWN_LENGTH]!r}, which is not there; copy all files of the model"
    config = _read_json(folder / "config.json")
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if isinstance(text, dict):
        yield from _token_problems(folder, text, _embedding_rows(shapes))


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read a header. Raises `ValueError`: eight bytes hold the length of a JSON header, then as many bytes follow."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_BYTES_MAX:
            raise ValueError("its header has an impossible length")
        header = json.loads(file.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    missing = 8 + length + end - path.stat().st_size
    if missing > 0:
        raise ValueError(f"{missing} bytes are missing")
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


def _embedding_rows(shapes: dict[str, tuple[int, ...]]) -> int | None:
    rows = [shape[0] for name, shape in shapes.items() if name.endswith(_EMBEDDINGS) and len(shape) == 2]
    return rows[0] if len(rows) == 1 else None


def _token_problems(folder: Path, config: dict[str, Any], rows: int | None) -> Iterator[str]:
    size = config.get("vocab_size")
    if isinstance(size, int) and rows is not None and size != rows:
        yield f"config.json: vocab_size = {size}, and the embedding has {rows} rows; use this model's configuration"
    known = [count for count in (rows, size) if isinstance(count, int)]
    limit = min(known) if known else None
    for name in _SPECIAL_IDS:
        for token in _ids(config.get(name)):
            if limit is not None and not 0 <= token < limit:
                yield f"config.json: {name} = {token} has no row in the embedding of {limit}; correct it"
    tokens = _tokenizer_tokens(folder)
    if tokens and limit is not None and max(tokens.values()) >= limit:
        outside = min((number, text) for text, number in tokens.items() if number >= limit)
        yield (
            f"{TOKENIZER_FILE}: token {outside[0]} ({outside[1][:_SHOWN_LENGTH]!r}) has no row in the embedding of "
            f"{limit}; resize the embedding, or remove the added tokens"
        )
    eos = tokens.get(_eos_text(folder))
    generation = _read_json(folder / "generation_config.json")
    ends = {*_ids(config.get("eos_token_id"))}
    ends |= {*_ids(generation.get("eos_token_id"))} if isinstance(generation, dict) else set()
    if eos is not None and ends and eos not in ends:
        yield (
            f"its eos differs: the tokenizer ends an answer with token {eos} ({_eos_text(folder)[:_SHOWN_LENGTH]!r}), "
            f"config.json and generation_config.json with {', '.join(map(str, sorted(ends)))}; make them agree"
        )


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _tokenizer_tokens(folder: Path) -> dict[str, int]:
    """Return text to id; empty where the file does not show it."""
    content = _read_json(folder / TOKENIZER_FILE)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return {}
    words = content["model"].get("vocab")
    tokens = words if isinstance(words, dict) else {}
    if isinstance(words, list):
        tokens = {str(piece[0]): place for place, piece in enumerate(words) if isinstance(piece, list) and piece}
    added = content.get("added_tokens") or []
    extra = {one["content"]: one["id"] for one in added if isinstance(one, dict) and {"content", "id"} <= one.keys()}
    return {text: number for text, number in {**tokens, **extra}.items() if isinstance(number, int)}


def _eos_text(folder: Path) -> str:
    config = _read_json(folder / "tokenizer_config.json")
    value = config.get("eos_token") if isinstance(config, dict) else None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _read_json(path: Path) -> Any:
    """Return None where the file cannot be read."""
    try:
        return json.loads(read_user_text(path))
    except (OSError, ValueError, RecursionError):
        return None
