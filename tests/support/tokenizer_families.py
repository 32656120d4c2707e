"""Small tokenizers of each family of `tokenizer.json` files, trained on demand, and short chat templates.

The pipelines are those of transformers 4 and 5 and of the conversion from GGUF. They differ in the spelling of spaces
and of bytes without a piece, and in the decoder. The templates are short forms of those of eight families, with the
differences that matter in an agent's history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.tiny_model import CHATML, CORPUS, SPECIAL

_TEXT = (
    *CORPUS,
    *('{"place": "Paris", "days": 3, "note": "ok"}', "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    *("0123456789", "\n", "\t", "".join(map(chr, range(32, 127))), "naïve café, grüße"),
)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPACED = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_FALLBACK, _FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}


@dataclass(frozen=True)
class Family:
    """One kind of tokenizer. `holds` is whether grammars can restrict a model's answers with it; otherwise it is
    refused.
    """

    name: str
    make: Callable[[], dict[str, Any]]
    """Function that returns the content of `tokenizer.json`."""
    holds: bool = True

    def build(self, folder: Path) -> Path:
        """Write a tiny Qwen3 with this tokenizer to `folder`."""
        import torch
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(self.make(), ensure_ascii=False)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(content),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            chat_template=CHATML,
        )
        fast.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        torch.manual_seed(0)
        rows = max(fast.get_vocab().values()) + 1
        config = Qwen3Config(
            vocab_size=rows, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
            eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, bos_token_id=None,
        )  # fmt: skip
        Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder, safe_serialization=True)
        return folder


def _trained(tokenizer: Any, trainer: Any) -> dict[str, Any]:
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def _byte_level(**changes: Any) -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    return _trained(tokenizer, trainer) | changes


def _gguf() -> dict[str, Any]:
    """Return a tokenizer that transformers converts from a byte-level vocabulary of a GGUF file."""
    content = _byte_level(decoder=_sequence(_FALLBACK, _FUSE, _SPACED, _BYTE_LEVEL))
    content["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<|endoftext|>"}
    return content


def _llama3() -> dict[str, Any]:
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    before = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
        _BYTE_LEVEL | {"add_prefix_space": False, "use_regex": False},
    ]
    content = _byte_level(pre_tokenizer={"type": "Sequence", "pretokenizers": before})
    content["model"]["ignore_merges"] = True
    return content


def _plain_tags() -> dict[str, Any]:
    """Return a tokenizer in which the tags of calls and reasoning are added tokens, not special ones, as in Qwen's."""
    content = _byte_level(normalizer={"type": "NFC"})
    for token in content["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    return content


def _sentencepiece(**changes: Any) -> dict[str, Any]:
    """Return a BPE of pieces with `▁`, and bytes for text without a piece."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    first = ["<unk>", *SPECIAL, *_BYTES]
    content = _trained(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in _BYTES]
    return content | {"decoder": _sequence(_SPACED, _FALLBACK, _FUSE, _STRIP)} | changes


def _metaspace(scheme: str) -> dict[str, Any]:
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return _sentencepiece(normalizer=None, pre_tokenizer=space)


def _gemma() -> dict[str, Any]:
    """Return a tokenizer that replaces spaces, adds none before a text, and strips no text."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return _sentencepiece(normalizer=spaces, decoder=_sequence(_SPACED, _FALLBACK, _FUSE))


def _unigram(*, fallback: bool) -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    first = ["<unk>", *SPECIAL, *(_BYTES if fallback else ())]
    content = _trained(
        tokenizer,
        trainers.UnigramTrainer(vocab_size=500, special_tokens=first, unk_token="<unk>", show_progress=False),
    )
    if fallback:
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in _BYTES]
        content["model"]["byte_fallback"] = True
        content["decoder"] = _sequence(_SPACED, _FALLBACK, _FUSE, _STRIP)
    return content


def _wordpiece() -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    first = ["[UNK]", *SPECIAL]
    return _trained(tokenizer, trainers.WordPieceTrainer(vocab_size=500, special_tokens=first, show_progress=False))


def _word_ends() -> dict[str, Any]:
    """Return a BPE that marks the ends of words, and therefore cannot distinguish one space from two."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIAL), end_of_word_suffix="</w>", show_progress=False
    )
    return _trained(tokenizer, trainer)


def _sequence(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


FAMILIES = (
    Family("byte-level", _byte_level),
    Family("byte-level, tags that are not special", _plain_tags),
    Family("byte-level, split as Llama 3", _llama3),
    Family("byte-level, converted from GGUF", _gguf),
    Family("sentencepiece with byte fallback, as transformers 4 writes it", _sentencepiece),
    Family("sentencepiece, metaspace first, as transformers 5 writes it", lambda: _metaspace("first")),
    Family("sentencepiece, metaspace always", lambda: _metaspace("always")),
    Family("sentencepiece without a prefix, as Gemma", _gemma),
    Family("unigram with byte fallback", lambda: _unigram(fallback=True)),
    Family("unigram, metaspace, no byte fallback", lambda: _unigram(fallback=False), holds=False),
    Family("WordPiece, lower case", _wordpiece, holds=False),
    Family("BPE with ends of words", _word_ends, holds=False),
)


_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}'
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}@THINKING@{{ m.content }}"
    "{% for call in m.tool_calls %}\n<tool_call>\n" + _CALL + "\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_THINKING = "{% if m.reasoning_content @WHEN@%}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_AFTER_THE_LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)

TEMPLATES: Mapping[str, str] = {
    "qwen2": _CHATML.replace("@THINKING@", ""),
    "qwen3, reasoning after the last user only": _AFTER_THE_LAST_USER
    + _CHATML.replace("@THINKING@", _THINKING.replace("@WHEN@", "and loop.index0 > ns.last ")),
    "interleaved reasoning": _CHATML.replace("@THINKING@", _THINKING.replace("@WHEN@", "")),
    "llama3, one call as the whole message": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
        "<|end_header_id|>\n\n{% if m.tool_calls %}" + _CALL.replace("call.", "m.tool_calls[0].") + "{% else %}"
        "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral, system prompt in the last user message, ids of calls": (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}<s>{% for m in rest %}"
        "{% if m.role == 'user' %}[INST] {% if loop.last %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]"
        "{% else %} {{ m.content }}{% for call in m.tool_calls %}[TOOL_CALLS] " + _CALL + "{% endfor %}</s>{% endif %}"
        "{% endfor %}"
    ),
    "gemma, trimmed answers": (
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ m.content | trim }}{% for call in m.tool_calls %}\n```tool_code\n" + _CALL + "\n```{% endfor %}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "deepseek-r1, reasoning is dropped": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}"
        "{% for call in m.tool_calls %}<|tool_call_begin|>" + _CALL + "<|tool_call_end|>{% endfor %}<|end|>"
        "{% elif m.role == 'tool' %}<|tool_output_begin|>{{ m.content }}<|tool_output_end|>"
        "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    ),
    "phi, one line for each message": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls %}<|tool_call|>"
        + _CALL
        + "<|/tool_call|>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}


@cache
def _compiled(family: str) -> Template:
    return ImmutableSandboxedEnvironment().from_string(TEMPLATES[family])


def render(family: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Return the prompt of `messages`, which have contents and tool calls."""
    filled = [{"tool_calls": [], "reasoning_content": None, **message} for message in messages]
    return _compiled(family).render(messages=filled, add_generation_prompt=add_generation_prompt)
