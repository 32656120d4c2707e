"""Checks of the files in a model's folder, without torch, for the trainer's `--check` and for imports of models.

Missing, unexpected and mismatched tensors, and weights that are not finite, are detected later, when the model is
loaded (`headrace_trainer.torch_learner`, `headrace_inference.torch_engine.loader`).
"""

from __future__ import annotations

import codecs
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace_runtime.storage.versions import FILE_PATTERNS, TEMPLATE_FILE, TOKENIZER_FILE, is_weights
from headrace_schemas.values.text import decode_text, read_user_text

_HEADER_BYTES_MAX = 100_000_000
_TEXT_BYTES_MAX = 256 << 20
"""Maximum bytes of a configuration, tokenizer or template. The largest tokenizers of today have 40 MB."""
_SIZE_MAX = 2**53
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SHOWN_LENGTH = 60
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the output head's weights in files: that of most models, and that of GPT-NeoX, which transformers renames on
loading."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_TEXTS = (
    "config.json", "generation_config.json", "tokenizer_config.json", TOKENIZER_FILE, "special_tokens_map.json",
    "model.safetensors.index.json", TEMPLATE_FILE,
)  # fmt: skip
_COMPARED_PIECES = 64
_COMPARED_BYTES = 4096
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Position, type and shape of one tensor in a file of weights."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def equals(self, other: StoredTensor) -> bool:
        """Return whether two tensors have equal bytes, by comparing 64 pieces of them. Tensors of unknown types count
        as equal."""
        size = _ITEM_BYTES.get(self.dtype, 0) * self.size
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        with self.path.open("rb") as file, other.path.open("rb") as other_file:
            for piece in range(_COMPARED_PIECES):
                at = (size - _COMPARED_BYTES) * piece // (_COMPARED_PIECES - 1) if size > _COMPARED_BYTES else 0
                file.seek(self.start + at)
                other_file.seek(other.start + at)
                count = min(size, _COMPARED_BYTES)
                if file.read(count) != other_file.read(count):
                    return False
        return True


def find_folder_problems(folder: Path) -> Iterator[str]:
    """Yield one message for each problem: a missing or broken file of weights, or token ids that contradict each
    other."""
    irregular = list(find_irregular_files(folder))
    yield from irregular
    if irregular:
        return  # reading a device or a pipe may never end
    yield from _text_problems(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= stored_tensors(path)
        except (OSError, ValueError) as error:
            yield f"{path.name} is not a safetensors file: {error}; copy it again"
    index = _read_json(folder / "model.safetensors.index.json")
    shards = index.get("weight_map") if isinstance(index, dict) else None
    for name in sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else ():
        if not _is_file(folder, name):
            yield f"its index names {name[:_SHOWN_LENGTH]!r}, which is not there; copy all files of the model"
    config = _read_json(folder / "config.json")
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if isinstance(text, dict):
        yield from _token_problems(folder, text, _embedding_rows(tensors))
        yield from _head_problems(config, text, tensors)
        yield from _architecture_problems(config)


def find_irregular_files(folder: Path) -> Iterator[str]:
    """Yield one message for each of the model's files that is not a regular file, is too large, or is a link to a file
    of another folder.

    A version contains copies of its files, so such a link would publish any file that this user can read. The links of
    a model hub's cache, from `snapshots/<commit>` to `blobs`, and links to weights are permitted.
    """
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots":
        roots.append((folder.parent.parent / "blobs").resolve())
    for path in sorted({path for pattern in FILE_PATTERNS for path in folder.glob(pattern)}):
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            yield f"{name} is not a file; copy it again"
        elif not is_weights(name):
            if not any(path.resolve().is_relative_to(root) for root in roots):
                yield f"{name} is a link to a file outside of the folder; replace it by a copy of that file"
            elif path.stat().st_size > _TEXT_BYTES_MAX:
                yield f"{name} is larger than {_TEXT_BYTES_MAX} bytes; copy it again"


def _is_file(folder: Path, name: str) -> bool:
    try:
        return (folder / name).is_file()
    except (OSError, ValueError):  # the name is too long or contains NUL
        return False


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Parse the header of a safetensors file. Return its tensors by name.

    Raises:
        ValueError: the header is not valid, or bytes are missing.
    """
    try:
        return _parse_tensors(path)
    except RecursionError:
        raise ValueError("its header is not valid: it is nested too deeply") from None
    except (struct.error, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"its header is not valid: {error}") from None


def _parse_tensors(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_BYTES_MAX:
            raise ValueError("its header has an impossible length")
        header = json.loads(file.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        if not all(map(_is_size, (*entry["shape"], *entry["data_offsets"]))):
            raise ValueError(f"its header is not valid: {name[:_SHOWN_LENGTH]!r} has a size that is no natural number")
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    missing = 8 + length + end - path.stat().st_size
    if missing > 0:
        raise ValueError(f"{missing} bytes are missing")
    return {
        name: StoredTensor(path, 8 + length + entry["data_offsets"][0], str(entry["dtype"]), tuple(entry["shape"]))
        for name, entry in entries.items()
    }


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _SIZE_MAX


def _embedding_rows(tensors: Mapping[str, StoredTensor]) -> int | None:
    table = _embedding(tensors)
    return None if table is None else tensors[table].shape[0]


def _embedding(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the name of the tensor of the input embeddings, or None unless there is exactly one."""
    names = [name for name, tensor in tensors.items() if name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2]
    return names[0] if len(names) == 1 else None


def _text_problems(folder: Path) -> Iterator[str]:
    """Yield a message for each file that tokenizer or model could not read as JSON or text."""
    for name in _TEXTS:
        path = folder / name
        try:
            content = path.read_bytes()
        except OSError:
            continue  # other checks report missing files
        try:
            text = decode_text(content)
            if name.endswith(".json"):
                json.loads(text)
        except RecursionError:
            yield f"{name} cannot be parsed: its JSON is nested too deeply; copy it again"
        except json.JSONDecodeError as error:
            yield f"{name} is not JSON: {error}; copy it again"
        except ValueError as error:
            yield f"{name} {error}"
        else:
            if content.startswith(codecs.BOM_UTF8):
                yield f"{name} begins with a byte order mark, which model libraries refuse; save it without"


def _head_problems(
    config: Mapping[str, Any], text: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Iterator[str]:
    """Yield a message if configuration and weights disagree about whether there is an output head.

    In that case transformers would initialise the head at random, or ignore its weights.
    """
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    head = next((name for name in tensors if f".{name}".endswith(tuple(f".{head}" for head in _HEADS))), None)
    table = _embedding(tensors)
    if tied is False and head is None and table is not None and _has_causal_head(config):
        yield (
            f"config.json: tie_word_embeddings = false, and the weights have no {_HEADS[0]}; copy all files of the "
            "model, or set it to true if the head is the embedding"
        )
    if tied is True and head is not None and table is not None and not tensors[head].equals(tensors[table]):
        yield (
            f"config.json: tie_word_embeddings = true, and {head} differs from {table}, so that the head would be "
            "dropped; set it to false, or use this model's configuration"
        )


def _has_causal_head(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_CAUSAL) for name in names)


def _architecture_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if the class and the model type in the configuration belong to different kinds of models."""
    kind, names = config.get("model_type"), config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not isinstance(kind, str) or not name.endswith(_CAUSAL) or _letters(name).startswith(_letters(kind)):
        return
    try:
        classes = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except (ImportError, AttributeError):
        return
    valid = classes.get(kind)
    if valid is not None and name in classes.values() and name not in ((valid,) if isinstance(valid, str) else valid):
        yield (
            f"config.json: architectures = {name[:_SHOWN_LENGTH]!r}, and model_type = {kind[:_SHOWN_LENGTH]!r} is "
            "another model; use this model's configuration"
        )


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _token_problems(folder: Path, config: dict[str, Any], rows: int | None) -> Iterator[str]:
    size = config.get("vocab_size")
    if isinstance(size, int) and rows is not None and size != rows:
        yield f"config.json: vocab_size = {size}, and the embedding has {rows} rows; use this model's configuration"
    sizes = [count for count in (rows, size) if isinstance(count, int)]
    limit = min(sizes) if sizes else None
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
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _tokenizer_tokens(folder: Path) -> dict[str, int]:
    """Return the token ids by text from `tokenizer.json`; an empty dict if the file has another structure."""
    content = _read_json(folder / TOKENIZER_FILE)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return {}
    words = content["model"].get("vocab")
    tokens = words if isinstance(words, dict) else {}
    if isinstance(words, list):
        tokens = {str(piece[0]): number for number, piece in enumerate(words) if isinstance(piece, list) and piece}
    added = content.get("added_tokens")
    entries = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    extra = {str(token["content"]): token["id"] for token in entries if {"content", "id"} <= token.keys()}
    return {text: number for text, number in {**tokens, **extra}.items() if isinstance(number, int)}


def _eos_text(folder: Path) -> str:
    config = _read_json(folder / "tokenizer_config.json")
    value = config.get("eos_token") if isinstance(config, dict) else None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _read_json(path: Path) -> Any:
    """Return the parsed JSON of a file, or None if it cannot be read."""
    try:
        return json.loads(read_user_text(path))
    except (OSError, ValueError, RecursionError):
        return None
