"""Tokenizer and chat template of a version. Versions that differ only in weights share one."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from pydantic import JsonValue

from headrace_inference.chat.detokenizer import Detokenizer, TokenDecoder
from headrace_inference.chat.parsers import tags
from headrace_inference.chat.plain import PlainText, ids_of
from headrace_inference.errors import PromptTooLarge, VersionUnusable
from headrace_runtime.errors import Refused, is_panic
from headrace_runtime.grammars.vocabulary import byte_level_table
from headrace_runtime.storage.versions import TEMPLATE_FILE, TOKENIZER_FILE, file_digest, template_digest
from headrace_schemas.events.turn import STOP_IDS_MAX
from headrace_schemas.values.blobs import Manifest
from headrace_schemas.values.text import read_user_text


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of rendering one prompt."""

    bytes_max: int
    """Largest size of the rendered text."""
    timeout_s: float


UNLIMITED = RenderLimits(2**62, 1e9)
_TRIAL_MESSAGE = {"role": "user", "content": "Hello"}
_TRIAL_NAME = "headrace_trial_tool"
_TRIAL_TOOL = {
    "type": "function",
    "function": {"name": _TRIAL_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text and bytes of one token in `logprobs.content`. The bytes may be an incomplete character."""

    text: str
    bytes: list[int]


class ChatTokenizer:
    """Tokenizer and chat template of a model folder. Thread-safe.

    Raises:
        VersionUnusable: the files differ from the manifest, or cannot be loaded.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        from transformers import AutoTokenizer

        if file_digest(folder / TOKENIZER_FILE) != manifest.tokenizer_sha256:
            raise VersionUnusable(f"{manifest.version}: {TOKENIZER_FILE} is not the one that its manifest names")
        # Manifests of earlier releases have the digest of the template file alone.
        if manifest.template_sha256 not in {template_digest(folder), file_digest(folder / TEMPLATE_FILE)}:
            raise VersionUnusable(f"{manifest.version}: its chat templates are not those that its manifest names")
        try:
            self._transformers_tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            self._inner: Any = self._transformers_tokenizer.backend_tokenizer
            self._inner.no_truncation()  # settings of its last use in training, which would cut or pad each prompt
            self._inner.no_padding()
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise VersionUnusable(f"{manifest.version}: tokenizer: {type(error).__name__}: {error}") from error
        if not self._transformers_tokenizer.chat_template:
            raise VersionUnusable(f"{manifest.version}: the tokenizer has no chat template")
        self._plain = PlainText(self._inner, str(self._transformers_tokenizer.chat_template))
        self.digest = bytes.fromhex(manifest.prompt_sha256)
        self.eos_id: int | None = self._transformers_tokenizer.eos_token_id
        self.eos_text: str = self._transformers_tokenizer.eos_token or ""
        self.stop_ids = _stop_ids(folder, self.eos_id)
        tag_ids = {self._inner.token_to_id(tag) for tag in tags()}
        special = {number for number, token in self._inner.get_added_tokens_decoder().items() if token.special}
        self.silent_ids = frozenset((special | self.stop_ids) - tag_ids)
        """Tokens that have no text in answers."""
        self._decoding = TokenDecoder(self._inner, self.silent_ids)
        self._with_special = TokenDecoder(self._inner, self.stop_ids)
        self._texts: dict[int, TokenText] = {}
        self._own_arguments = inspect.signature(self._transformers_tokenizer.apply_chat_template).parameters.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        extra: Mapping[str, JsonValue],
        limits: RenderLimits = UNLIMITED,
        *,
        open_answer: bool = True,
    ) -> str:
        """Render messages with the chat template. Control tokens in messages are masked; `plain` restores them.

        Args:
            messages: the conversation.
            tools: the tools that the request offers, or None.
            extra: variables for the template.
            limits: bounds of rendering.
            open_answer: whether to append the template's text that begins an answer.

        Raises:
            Refused: the template refuses the messages, or `limits` are exceeded.
        """
        if tools and not self.shows_tools:
            message = (
                "tools: the chat template of this model does not show tools to it; leave them out, or serve a model "
                "whose template does"
            )
            raise Refused(400, "unsupported_value", message, "tools")
        reserved = self._own_arguments & extra.keys()
        if reserved:
            message = f"chat_template_kwargs: {min(reserved)!r} is reserved; remove it"
            raise Refused(400, "unsupported_value", message, "chat_template_kwargs")
        try:
            pieces = self._pieces(
                [self._plain.mask(dict(message), answer=message.get("role") == "assistant") for message in messages],
                self._plain.mask(list(tools)) if tools else None,
                self._plain.mask(dict(extra)),
                open_answer=open_answer,
            )
            return _join(pieces, limits)
        except (TemplateError, TypeError, KeyError, ValueError, ArithmeticError, RecursionError) as error:
            message = f"the model's chat template refuses these messages: {self.plain(str(error))[:300]}"
            raise Refused(400, "invalid_messages", message, "messages") from None

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt, as rendering a trial tool shows.

        It is also true if the template raises an error for the trial tool, so that the template itself refuses requests
        with tools.
        """
        try:
            pieces = self._pieces([_TRIAL_MESSAGE], [_TRIAL_TOOL], {}, open_answer=True)
            return _TRIAL_NAME in _join(pieces, UNLIMITED)
        except Exception:  # noqa: BLE001 (a template may raise whatever its expressions raise)
            return True

    def _pieces(
        self, messages: list[Any], tools: list[Any] | None, extra: Mapping[str, JsonValue], *, open_answer: bool
    ) -> Iterator[str]:
        """Render the chat template, and yield its output piece by piece."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled = _compile_jinja_template(self._transformers_tokenizer.get_chat_template(None, tools))
        variables = {**self._transformers_tokenizer.special_tokens_map, **extra}
        pieces: Iterator[str] = compiled.generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=open_answer, **variables
        )
        return pieces

    def plain(self, text: str) -> str:
        """Return rendered text with the original control tokens of messages in place of their stand-ins."""
        return self._plain.unmask(text)

    def encode(self, text: str) -> list[int]:
        """Tokenize rendered text. Control tokens of the template stay control tokens; those in messages become text."""
        return self._plain.encode(text)

    def encode_raw(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text that no template rendered. Its control tokens become control tokens.

        Args:
            add_special_tokens: whether to add the tokens with which the tokenizer begins or ends its texts.
        """
        return ids_of(self._inner, text, add_special_tokens=add_special_tokens)

    def text_of(self, ids: Sequence[int], *, special_as_text: bool = False) -> str:
        """Return the text of an answer's tokens, equal to the text that the decoder of `stream` returns in pieces.

        Args:
            special_as_text: whether special tokens are text, except those that end an answer.
        """
        stream = self.stream(special_as_text=special_as_text)
        return stream.feed(ids) + stream.end()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text

    def stream(self, *, special_as_text: bool = False) -> Detokenizer:
        """Return a decoder for one answer. `special_as_text`: whether special tokens are text, except end tokens."""
        return Detokenizer(self._with_special if special_as_text else self._decoding)

    def token(self, token_id: int) -> TokenText:
        """Return the text and the bytes of one token."""
        token_text = self._texts.get(token_id)
        if token_text is None:
            token_text = self._texts[token_id] = self._token(token_id)
        return token_text

    def _token(self, token_id: int) -> TokenText:
        raw: str | None = self._inner.id_to_token(token_id)
        added = token_id in self._added
        if raw is not None and not added and self._bytes_of is not None and all(c in self._bytes_of for c in raw):
            data = bytes(self._bytes_of[c] for c in raw)
            return TokenText(data.decode("utf-8", "replace"), list(data))
        if token_id in self._decoding.bytes_of:
            data = bytes([self._decoding.bytes_of[token_id]])
            return TokenText(data.decode("utf-8", "replace"), list(data))
        text: str = raw if raw is not None and added else self._inner.decode([token_id], skip_special_tokens=False)
        return TokenText(text, list(text.encode()))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is spelled `text`; None if the vocabulary has none."""
        token_id: int | None = self._inner.token_to_id(text)
        return token_id

    @property
    def template(self) -> str:
        """Source of the chat template, or of all chat templates."""
        return str(self._transformers_tokenizer.chat_template)

    @property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer as transformers loaded it, for parsers and grammars that need its class."""
        return self._transformers_tokenizer

    @cached_property
    def last_id(self) -> int:
        """Highest token id of the vocabulary."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=0)

    def tokens_from(self, first: int) -> list[str]:
        """Return the texts of the tokens with ids from `first` on, in the order of ids."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return [text for text, number in sorted(vocabulary.items(), key=itemgetter(1)) if number >= first]

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._inner.get_added_tokens_decoder())

    @cached_property
    def _bytes_of(self) -> Mapping[str, int] | None:
        """Byte of each character of byte-level vocabularies (GPT-2's table); None for other vocabularies."""
        if "ByteLevel" not in repr(self._inner.decoder):
            return None
        return byte_level_table()


def _join(pieces: Iterator[str], limits: RenderLimits) -> str:
    """Join rendered pieces. The limits are checked after each piece, so that an expensive template stops early."""
    deadline_s = time.monotonic() + limits.timeout_s
    joined: list[str] = []
    remaining = limits.bytes_max
    for piece in pieces:
        joined.append(piece)
        remaining -= len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
        if remaining < 0:
            raise PromptTooLarge(limits.bytes_max)
        if time.monotonic() > deadline_s:
            message = f"the model's chat template took longer than {limits.timeout_s:g} s with these messages"
            raise Refused(400, "template_timeout", message, "messages")
    return "".join(joined)


def _stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's end token, and those of the model's configuration files.

    Raises:
        VersionUnusable: there are more of them than a turn can record.
    """
    stop_ids = {eos_id} if eos_id is not None else set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(read_user_text(path)).get("eos_token_id") if path.exists() else None
        stop_ids.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    if len(stop_ids) > STOP_IDS_MAX:
        raise VersionUnusable(f"eos_token_id: {len(stop_ids)} tokens end an answer; a model may have {STOP_IDS_MAX}")
    return frozenset(stop_ids)
