"""A version's tokenizer and chat template. Versions with equal files, the weights apart, share one."""

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

from headrace_inference.chat.detokenizer import Decoding, Detokenizer
from headrace_inference.chat.parsers import tags
from headrace_inference.chat.plain import PlainText
from headrace_inference.chat.vocabulary import byte_level_table
from headrace_inference.errors import PromptTooLarge, VersionUnusable
from headrace_runtime.errors import Refused
from headrace_runtime.versions import TEMPLATE_FILE, TOKENIZER_FILE, file_digest, template_digest
from headrace_schemas.manifest import Manifest
from headrace_schemas.user_text import read_user_text


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """How much one prompt may take before it is a prompt."""

    bytes_max: int
    """Of its text."""
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
    """One token as `logprobs.content` shows it: its bytes may be no whole character."""

    text: str
    bytes: list[int]


class ChatTokenizer:
    """Reads a model folder. Raises `VersionUnusable`. Usable from several threads."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        from transformers import AutoTokenizer

        if file_digest(folder / TOKENIZER_FILE) != manifest.tokenizer_sha256:
            raise VersionUnusable(f"{manifest.version}: {TOKENIZER_FILE} is not the one that its manifest names")
        # Earlier releases knew no other template than the one in its own file.
        if manifest.template_sha256 not in {template_digest(folder), file_digest(folder / TEMPLATE_FILE)}:
            raise VersionUnusable(f"{manifest.version}: its chat templates are not those that its manifest names")
        try:
            self._outer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self._inner: Any = self._outer.backend_tokenizer
        except Exception as error:
            raise VersionUnusable(f"{manifest.version}: tokenizer: {type(error).__name__}: {error}") from error
        if not self._outer.chat_template:
            raise VersionUnusable(f"{manifest.version}: it has no chat template")
        self._plain = PlainText(self._inner, str(self._outer.chat_template))
        self.digest = bytes.fromhex(manifest.prompt_sha256)
        self.eos_id: int | None = self._outer.eos_token_id
        self.eos_text: str = self._outer.eos_token or ""
        self.stop_ids = _stop_ids(folder, self.eos_id)
        read = {self._inner.token_to_id(tag) for tag in tags()}
        special = {number for number, token in self._inner.get_added_tokens_decoder().items() if token.special}
        self.silent_ids = frozenset((special | self.stop_ids) - read)
        """Tokens that are no part of the text."""
        self._decoding = Decoding(self._inner, self.silent_ids)
        self._every = Decoding(self._inner, self.stop_ids)
        self._texts: dict[int, TokenText] = {}
        self._own_arguments = inspect.signature(self._outer.apply_chat_template).parameters.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        extra: Mapping[str, JsonValue],
        limits: RenderLimits = UNLIMITED,
        *,
        open_answer: bool = True,
    ) -> str:
        """The prompt as text, in which `plain` shows what was meant: ready for the answer, or as it is after one.

        `extra` are variables for the template; it cannot bring a template of its own. Raises `Refused` when the
        template does not take the messages, or not within `limits`.
        """
        if tools and not self.shows_tools:
            message = (
                "tools: the chat template of this model does not show tools to it; leave them out, or serve a model "
                "whose template does"
            )
            raise Refused(400, "unsupported_value", message, "tools")
        taken = self._own_arguments & extra.keys()
        if taken:
            message = f"chat_template_kwargs: {min(taken)!r} is not for the client to choose"
            raise Refused(400, "unsupported_value", message, "chat_template_kwargs")
        try:
            pieces = self._pieces(
                [self._plain.mask(dict(message), answer=message.get("role") == "assistant") for message in messages],
                self._plain.mask(list(tools)) if tools else None,
                self._plain.mask(dict(extra)),
                open_answer=open_answer,
            )
            return _joined(pieces, limits)
        except (TemplateError, TypeError, KeyError, ValueError, ArithmeticError, RecursionError) as error:
            message = f"the model's chat template refuses these messages: {self.plain(str(error))[:300]}"
            raise Refused(400, "invalid_messages", message, "messages") from None

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt, by the name of a trial tool.

        A template that raises at it counts as one that does: its own words then refuse each request with tools.
        """
        try:
            pieces = self._pieces([_TRIAL_MESSAGE], [_TRIAL_TOOL], {}, open_answer=True)
            return _TRIAL_NAME in _joined(pieces, UNLIMITED)
        except Exception:  # noqa: BLE001 (a template may raise whatever its expressions raise)
            return True

    def _pieces(
        self, messages: list[Any], tools: list[Any] | None, extra: Mapping[str, JsonValue], *, open_answer: bool
    ) -> Iterator[str]:
        """What `apply_chat_template` joins, as it comes."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled = _compile_jinja_template(self._outer.get_chat_template(None, tools))
        given = {**self._outer.special_tokens_map, **extra}
        pieces: Iterator[str] = compiled.generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=open_answer, **given
        )
        return pieces

    def plain(self, text: str) -> str:
        """Rendered text as it was meant: what messages wrote in place of its stand-ins."""
        return self._plain.unmask(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text: what the template spelled out is a control token, what messages did is text."""
        return self._plain.encode(text)

    def text_of(self, ids: Sequence[int], *, whole: bool = False) -> str:
        """The text of an answer: all its tokens but the silent ones. The same as a stream gives out."""
        stream = self.stream(whole=whole)
        return stream.feed(ids) + stream.end()

    def spelled(self, ids: Sequence[int]) -> str:
        """The text of all of these tokens, control tokens included."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text

    def stream(self, *, whole: bool = False) -> Detokenizer:
        """`whole`: with special tokens as text, other than those that end an answer."""
        return Detokenizer(self._every if whole else self._decoding)

    def token(self, token_id: int) -> TokenText:
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._token(token_id)
        return found

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
        """The one token that is written like this; None: there is none."""
        found: int | None = self._inner.token_to_id(text)
        return found

    @property
    def template(self) -> str:
        """The chat template as it stands; of several, all."""
        return str(self._outer.chat_template)

    @property
    def outer(self) -> Any:
        """Transformers' tokenizer."""
        return self._outer

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that are never a part of a text, but stand for themselves."""
        return frozenset(number for number, token in self._inner.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def last_id(self) -> int:
        """The highest token id that it makes."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=0)

    def tokens_from(self, first: int) -> list[str]:
        """The tokens with ids of at least `first`, in order."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return [text for text, number in sorted(vocabulary.items(), key=itemgetter(1)) if number >= first]

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._inner.get_added_tokens_decoder())

    @cached_property
    def _bytes_of(self) -> Mapping[str, int] | None:
        """Character to byte for byte-level vocabularies (GPT-2's table), None for others."""
        if "ByteLevel" not in repr(self._inner.decoder):
            return None
        return byte_level_table()


def _joined(pieces: Iterator[str], limits: RenderLimits) -> str:
    """Looked at after each piece, so that a template that repeats itself for every message ends in time."""
    deadline_s = time.monotonic() + limits.timeout_s
    found: list[str] = []
    room = limits.bytes_max
    for piece in pieces:
        found.append(piece)
        room -= len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
        if room < 0:
            raise PromptTooLarge(limits.bytes_max)
        if time.monotonic() > deadline_s:
            message = f"the model's chat template took longer than {limits.timeout_s:g} s with these messages"
            raise Refused(400, "template_timeout", message, "messages")
    return "".join(found)


def _stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Every token that ends an answer: the tokenizer's, and those that the model's configuration adds."""
    found = {eos_id} if eos_id is not None else set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(read_user_text(path)).get("eos_token_id") if path.exists() else None
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return frozenset(found)
