"""See the package above."""

from __future__ import annotations

from typing import NoReturn

ChatTemplateContentFormat = str
ConversationMessage = dict


def parse_chat_messages(*_: object, **__: object) -> NoReturn:
    """Raises `NotImplementedError`."""
    raise NotImplementedError("vLLM is not installed here: workflows have to ask by the OpenAI client")


parse_chat_messages_async = parse_chat_messages
