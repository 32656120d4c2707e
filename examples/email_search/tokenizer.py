"""The tokenizer of the base model: the words of queries are whole, and so are the recurring pieces of calls."""

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
"""Entries. Bytes, markup and the words of queries with their merges fill about 600."""
_PARAMETERS = {**{name: tool.parameter for name, tool in TOOLS.items()}, **INVENTED}
RECURRING = (*(bpe.call_opening(*tool) for tool in _PARAMETERS.items()), f'", {json.dumps(LIMIT)}: ', "}}", *TOOLS)
"""Pieces of tool calls that are one token each."""
_SAID = " ".join((*queries.OPENINGS, *itertools.chain(*queries.WORDINGS.values())))
WORDS = (*words.ALL, *sorted(set(re.findall(r"[A-Za-z]+", _SAID))))


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer for `texts`: what users say."""
    return bpe.train(texts, WORDS, RECURRING, VOCABULARY)
