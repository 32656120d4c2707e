"""instructor: an answer of a type, by a forced tool."""

import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Found(BaseModel):
    """The answer."""

    answer: str


client: Any = instructor.from_openai(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"))
messages = [{"role": "user", "content": sys.argv[2]}]
print(client.chat.completions.create(model="gpt-5", response_model=Found, messages=messages).answer)
