"""Errors of the inference service."""

from __future__ import annotations

from headrace_runtime.errors import HeadraceError, Refused

_TEXT_LENGTH_MAX = 60


class VersionUnusable(HeadraceError):
    """A version cannot be served by this replica because of its architecture, tokenizer, files or fingerprint."""


class NoRoom(VersionUnusable):
    """Raised if memory does not suffice to serve a version in addition to the loaded ones.

    The replica tries to load it again when routing changes.
    """


class EngineFailed(HeadraceError):
    """The engine failed while it computed an answer. The request may succeed on another replica or later."""


class UnknownVersion(Refused):
    """The version is not loaded on this replica."""

    def __init__(self, model: str, detail: str = "") -> None:
        super().__init__(404, "model_not_found", f"model {model!r} is not loaded on this replica{detail}", "model")


class ContextLengthExceeded(Refused):
    """Prompt and completion together are longer than the context. They are never truncated."""

    def __init__(self, prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
        completion = f" and {max_tokens} for the completion" if max_tokens else ""
        super().__init__(
            400,
            "context_length_exceeded",
            f"the maximum context length is {limit} tokens, you asked for {prompt_tokens} in the messages{completion}",
            "messages",
        )


class PromptTooLarge(Refused):
    """The text of the prompt is larger than the bound. This is checked before it is tokenized."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(
            413,
            "prompt_too_large",
            f"messages and tools make a prompt of more than {bytes_max} bytes; send less",
            "messages",
        )


class Overloaded(Refused):
    """The replica already runs and queues its maximum number of sequences. The response has a `retry-after` header."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(503, "overloaded", message)
        self.retry_after_s = retry_after_s


class TokenOutOfVocabulary(Refused):
    """The model's embedding has no row for a token. `text` is the token as the tokenizer writes it."""

    def __init__(self, token: int, vocabulary: int, field: str, text: str = "") -> None:
        description = f"{token} ({text[:_TEXT_LENGTH_MAX]!r})" if text else str(token)
        super().__init__(
            400,
            "invalid_value",
            f"{field}: token {description} has no row in the model's embedding, whose token ids are below "
            f"{vocabulary}; leave the token out",
            field,
        )


class PromptEmpty(Refused):
    """The prompt has no token."""

    def __init__(self) -> None:
        message = "messages: the chat template renders these messages to an empty prompt; send some text"
        super().__init__(400, "invalid_value", message, "messages")
