"""What this service raises, besides the shared tree."""

from __future__ import annotations

from headrace_runtime.errors import HeadraceError, Refused

_SHOWN_LENGTH = 60


class VersionUnusable(HeadraceError):
    """A version that can never be served here as it is: wrong architecture, tokenizer, files or fingerprint."""


class NoRoom(VersionUnusable):
    """A version that cannot be served here while so many others are; it is tried again when routing changes."""


class EngineFailed(HeadraceError):
    """The engine broke while it computed; the request may succeed elsewhere or later."""


class UnknownVersion(Refused):
    """Nobody loaded this version here."""

    def __init__(self, model: str, detail: str = "") -> None:
        super().__init__(404, "model_not_found", f"model {model!r} is not loaded on this replica{detail}", "model")


class ContextLengthExceeded(Refused):
    """Prompt and completion do not fit; they are never truncated to fit."""

    def __init__(self, prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
        asked = f" and {max_tokens} for the completion" if max_tokens else ""
        super().__init__(
            400,
            "context_length_exceeded",
            f"the maximum context length is {limit} tokens, you asked for {prompt_tokens} in the messages{asked}",
            "messages",
        )


class PromptTooLarge(Refused):
    """More text than `inference.prompt_bytes_max`, which is known before it is tokenized."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(
            413,
            "prompt_too_large",
            f"messages and tools make a prompt of more than {bytes_max} bytes (inference.prompt_bytes_max); send less",
            "messages",
        )


class Overloaded(Refused):
    """Every place and every waiting place is taken. Says when to come back."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(503, "overloaded", message)
        self.retry_after_s = retry_after_s


class TokenOutOfVocabulary(Refused):
    """A token for which the model's embedding has no row. `shown` names it as the tokenizer writes it."""

    def __init__(self, token: int, vocabulary: int, field: str, shown: str = "") -> None:
        named = f"{token} ({shown[:_SHOWN_LENGTH]!r})" if shown else str(token)
        super().__init__(
            400,
            "invalid_value",
            f"{field}: token {named} has no row in the model's embedding, whose token ids are below {vocabulary}; "
            "leave the token out",
            field,
        )


class PromptEmpty(Refused):
    """There is no token after which an answer could begin."""

    def __init__(self) -> None:
        message = "messages: the chat template makes a prompt without a token of these messages; send some text"
        super().__init__(400, "invalid_value", message, "messages")
