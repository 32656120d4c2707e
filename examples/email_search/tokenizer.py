"""Tokenizer of the base model: the words of queries and the recurring parts of calls are single tokens."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from email_agent import words
from email_search import queries
from email_search.demonstrations import INVENTED
from email_search.tools import LIMIT, TOOLS
from example_parts import bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 640
"""Vocabulary size. Bytes, markup and the words of queries with their merges need about 600 entries."""
_PARAMETERS = {**{name: tool.parameter for name, tool in TOOLS.items()}, **INVENTED}
RECURRING = (*(bpe.call_opening(*tool) for tool in _PARAMETERS.items()), f'", {json.dumps(LIMIT)}: ', "}}", *TOOLS)
"""Parts of tool calls that are one token each."""
_QUESTION_TEXTS = " ".join((*queries.OPENINGS, *itertools.chain(*queries.WORDINGS.values())))
WORDS = (*words.ALL, *sorted(set(re.findall(r"[A-Za-z]+", _QUESTION_TEXTS))))


def train(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on users' texts."""
    return bpe.train(texts, WORDS, RECURRING, VOCABULARY)
