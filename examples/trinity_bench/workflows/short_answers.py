"""A workflow of Trinity-RFT's, as its users write them: asks one question, and gives 1 for an answer that holds what
was expected."""

from __future__ import annotations

from typing import Any

from trinity.common.experience import Experience
from trinity.common.workflows import WORKFLOWS, Workflow


@WORKFLOWS.register_module("short_answers")
class ShortAnswers(Workflow):  # type: ignore[misc, unused-ignore]
    """Reads the columns `question` and `answer`."""

    is_async = True

    async def run_async(self) -> list[Any]:
        client = self.model.get_openai_async_client()
        answered = await client.chat.completions.create(
            model=client.model_path,
            messages=[{"role": "user", "content": self.task.raw_task["question"]}],
            max_tokens=self.task.rollout_args.max_tokens,
        )
        text = answered.choices[0].message.content or ""
        reward = float(self.task.raw_task["answer"] in text)
        return [Experience(reward=reward, response_text=text, metrics={"accuracy": reward})]
