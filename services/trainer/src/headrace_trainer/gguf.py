"""`python -m headrace_trainer.gguf FILE FOLDER`: converts a GGUF file into a folder in Hugging Face's layout.

transformers reads configuration and weights, which are stored in float32. The tokenizer is built from the file's
vocabulary here, because the conversion of transformers 5 swaps `bos` and `eos`, adds a byte fallback to byte-level
vocabularies, and ignores the rule by which the model's tokenizer splits a text. Standard output gets one line of JSON:
the architecture and the type of most weights. An error is one line on standard error with status 1.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_BYTE_LEVEL = "gpt2"
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens in a GGUF file."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}", "qwen2": rf"{_WORDS}|\p{{N}}{_REST}"}
_PLAIN = ("gpt-2", "default")
_DIGITS = ("smollm",)
_TOKENS = "tokenizer.ggml.tokens"
_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TURN_END = "tokenizer.ggml.eot_token_id"
_TEMPLATE = "tokenizer.chat_template"


class NotConvertible(ValueError):
    """Error: a GGUF file cannot be converted. The message names the reason and a remedy."""


def convert(source: Path, folder: Path) -> dict[str, str]:
    """Convert a GGUF file into a model in `folder`, and return its architecture and its weights' type. Blocks.

    Raises:
        NotConvertible: the tokenizer or the architecture is not supported, or the file is damaged.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, OSError, KeyError) as error:
        raise NotConvertible(f"is not a GGUF file: {error}; copy it again") from None
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    architecture = str(reader.fields["general.architecture"].contents())
    tokenizer = build_tokenizer(fields)
    _write_tokenizer(folder, tokenizer, fields)
    ends = [fields[name] for name in (_IDS["eos_token"], _TURN_END) if name in fields]
    head = reader.fields.get(f"{architecture}.attention.key_length")
    _write_weights(source, folder, list(dict.fromkeys(ends)), None if head is None else int(head.contents()))
    types = Counter[str]()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    return {"architecture": architecture, "weights": types.most_common(1)[0][0]}


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the fields of a GGUF file describe.

    Raises:
        NotConvertible: the vocabulary is not a byte-level one, or its rule for splitting a text is not known.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind = fields.get("tokenizer.ggml.model")
    if kind != _BYTE_LEVEL or not fields.get("tokenizer.ggml.merges"):
        raise NotConvertible(
            f"its tokenizer is of the kind {kind!r}, not byte-level BPE; name the model as safetensors"
        )
    split = str(fields.get("tokenizer.ggml.pre", "default"))
    tokens: list[str] = fields[_TOKENS]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    for number, type_ in enumerate(fields.get("tokenizer.ggml.token_type", ())):
        if type_ in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(tokens[number], normalized=False, special=type_ == _CONTROL)])
    return tokenizer


def _pre_tokenizer(split: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if split in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split in _DIGITS:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if split in _SPLITS:
        words = pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join((*_PLAIN, *_DIGITS, *_SPLITS))
    raise NotConvertible(f"its tokenizer splits texts by the rule {split!r}, not by one of {known}; use safetensors")


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    tokens = fields[_TOKENS]
    config: dict[str, Any] = {name: tokens[fields[key]] for name, key in _IDS.items() if key in fields}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in config:
        config["add_bos_token"] = True
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if template := fields.get(_TEMPLATE):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_weights(source: Path, folder: Path, ends: list[int], head_dim: int | None) -> None:
    """Write the weights of a GGUF file and their configuration into `folder`, as a model that transformers loads.

    Args:
        ends: ids of the tokens that end an answer (EOS).
        head_dim: size of an attention head as the GGUF file states it; set explicitly, because transformers does not
            read it for every architecture. None if the file has none.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        if head_dim is not None and hasattr(config, "head_dim"):
            config.head_dim = head_dim
        model, info = AutoModelForCausalLM.from_pretrained(
            source.parent,
            config=config,
            gguf_file=source.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError, NotImplementedError, OSError, RuntimeError) as error:
        raise NotConvertible(f"transformers cannot read it: {error}; name the model as safetensors") from None
    if wrong := {name: sorted(map(str, keys))[:3] for name, keys in info.items() if keys}:
        raise NotConvertible(f"its weights are not those of its architecture: {wrong}; name the model as safetensors")
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers saves no model that it read from a quantized file
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends or config.eos_token_id, pad_token_id=config.pad_token_id
    )
    plain.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(json.dumps(convert(Path(sys.argv[1]), Path(sys.argv[2]))))  # noqa: T201 - the result of the program
    except NotConvertible as problem:
        sys.exit(" ".join(str(problem).split()))
    except ImportError as problem:
        sys.exit(f"GGUF files need the package {problem.name}; install headrace[local]")
