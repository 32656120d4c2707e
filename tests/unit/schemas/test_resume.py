"""Request to a replica that takes over a generation."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace_schemas.http.replica_api import Resume


def test_arrays_travel_packed_and_come_back() -> None:
    resume = Resume.model_validate({"choices": [{"index": 1, "token_ids": [5, 6], "logprobs": [-0.5, -1.25]}]})
    assert '"token_ids":"BQAAAAYAAAA="' in resume.model_dump_json()
    assert Resume.model_validate_json(resume.model_dump_json()) == resume


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [{"index": 0, "token_ids": [5], "logprobs": []}],
        [{"index": 0, "token_ids": [], "logprobs": []}, {"index": 0, "token_ids": [], "logprobs": []}],
    ],
    ids=["empty", "lengths", "twice"],
)
def test_what_does_not_add_up_is_refused(choices: object) -> None:
    with pytest.raises(ValidationError):
        Resume.model_validate({"choices": choices})
