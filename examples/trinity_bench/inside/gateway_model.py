"""Model of a workflow whose calls go to the gateway, with the seed and the session of one play."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from trinity.common.models.experience_extraction import convert_api_output_to_experience
from trinity.common.models.model import ModelWrapper

from trinity_bench.inside.external_model import BASE_URL

_SEEDS = 2**31
_TURNS_MAX = 1024


class GatewayModel(ModelWrapper):  # type: ignore[misc]
    """Model of one play. `chat` and `chat_async`, which normally call Trinity's engines, send chat completions."""

    def __init__(self, config: Any, seed: int, session: str) -> None:
        super().__init__(models=[], config=config, api_address=os.environ[BASE_URL].rstrip("/"))
        self._api_key = os.environ.get("OPENAI_API_KEY", "none")
        self._seeds = itertools.count(seed * _TURNS_MAX)
        self._headers = {"X-Headrace-Purpose": "eval", "X-Session-Id": session}

    def get_openai_client(self) -> Any:
        if self.openai_client is None:
            _steer(super().get_openai_client(), self._seeds, self._headers)
        return super().get_openai_client()

    def get_openai_async_client(self) -> Any:
        if self.openai_async_client is None:
            _steer(super().get_openai_async_client(), self._seeds, self._headers)
        return super().get_openai_async_client()

    def chat(self, messages: list[dict[str, Any]], **sampling: Any) -> list[Any]:
        completions = self.get_openai_client().chat.completions
        answer = completions.create(model=self.model_path, messages=messages, **self._fields(sampling))
        experiences: list[Any] = convert_api_output_to_experience(answer)
        return experiences

    async def chat_async(self, messages: list[dict[str, Any]], **sampling: Any) -> list[Any]:
        completions = self.get_openai_async_client().chat.completions
        answer = await completions.create(model=self.model_path, messages=messages, **self._fields(sampling))
        experiences: list[Any] = convert_api_output_to_experience(answer)
        return experiences

    def _fields(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return request fields for Trinity's sampling arguments, which are those of vLLM."""
        arguments = {**self.generate_kwargs, **{name: value for name, value in sampling.items() if value is not None}}
        fields = {
            name: arguments[name] for name in ("temperature", "top_p", "max_tokens", "n", "stop") if name in arguments
        }
        extra = dict(arguments.get("extra_body", {}))
        if arguments.get("top_k", -1) > 0:
            extra["top_k"] = arguments["top_k"]
        return {**fields, "extra_body": extra}


def _steer(client: Any, seeds: Iterator[int], headers: Mapping[str, str]) -> None:
    """Give each completion of `client` the next seed, unless it has one, and the headers of the play."""
    create = client.chat.completions.create

    def steered(*args: Any, **fields: Any) -> Any:
        all_headers = {**headers, **(fields.pop("extra_headers", None) or {})}
        return create(*args, **{"seed": next(seeds) % _SEEDS, **fields, "extra_headers": all_headers})

    client.chat.completions.create = steered
