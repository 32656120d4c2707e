"""Tokens of one answer as a page shows them: how each was sampled, its two probabilities, and its colour.

One probability is that at the time of the call, the other one that under the weights of another version ("now").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace_console.sources.tokenizers import TokenTexts
from headrace_schemas import Turn
from headrace_schemas.events.turn import iterate_sets

WINDOW = 4_000
"""Number of tokens that one page shows as coloured text."""
TABLE_ROWS = 200
_LEAD = 500
"""Number of prompt tokens before the answer that the first page shows."""
_LEVELS = (0.9, 0.5, 0.2, 0.05, 0.01)
"""Lower bounds of the probability for the CSS classes `l0`, `l1` and so on. Less likely tokens have `l5`."""
_CHANGES = (0.1, 1.0)
"""Lower bounds of the change of a logprob, in nats, for the CSS classes `u1` and `u2` (up) and `d1` and `d2` (down)."""
COLOURS = ("then", "now", "change")
LEGEND = (
    *((f"l{level}", f"at least {share:.0%}") for level, share in enumerate(_LEVELS)),
    (f"l{len(_LEVELS)}", f"below {_LEVELS[-1]:.0%}"),
)
CHANGE_LEGEND = (
    ("u2", "at least e times as likely"),
    ("u1", "likelier"),
    ("z", "within 10 %"),
    ("d1", "less likely"),
    ("d2", "at most 1/e as likely"),
)


@dataclass(frozen=True, slots=True)
class LensToken:
    """One token of a turn with its text and probabilities.

    `kind` is `prompt`, `sampled` or, if a sampling constraint left no other token, `forced`.
    """

    position: int
    token_id: int
    text: str
    kind: str
    then: float | None = None
    """Logprob of the token at the time of the call, or None if it is not known."""
    now: float | None = None
    """Logprob of the token under the weights of another version, or None if it was not computed."""
    colour: str = ""
    """CSS class of the colour."""

    @property
    def label(self) -> str:
        """Text of the token's tool tip: kind, id and probabilities."""
        numbers = [f"{self.kind}, id {self.token_id}"]
        numbers += [f"p {math.exp(self.then):.3f} then"] if self.then is not None else []
        numbers += [f"{math.exp(self.now):.3f} now"] if self.now is not None else []
        return ", ".join(numbers)


@dataclass(frozen=True, slots=True)
class Lens:
    """Tokens of a turn: the prompt tokens that the turn's event contains, followed by those of one answer."""

    turn: Turn
    choice: int
    texts: TokenTexts | None
    now: Sequence[float] = ()
    """Logprobs of the answer under another version; empty if they were not computed."""

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens in the turn's event, without those that only an earlier turn's event contains."""
        return len(self.turn.prompt_token_ids)

    @property
    def length(self) -> int:
        """Number of the prompt's and the answer's tokens together."""
        return self.prompt_length + len(self.turn.choices[self.choice].token_ids)

    @property
    def has_logprobs(self) -> bool:
        """Whether the logprobs of the sampling policy are known."""
        return any(self.turn.choices[self.choice].logprobs) or self.turn.sampling.drawn

    def first_window(self) -> int:
        """Return the index of the token at which the first page begins, shortly before the answer."""
        return max(0, self.prompt_length - _LEAD)

    def tokens(self, start: int, stop: int, colour: str) -> list[LensToken]:
        """Return the tokens from index `start` up to `stop`. `colour` is the colour scheme, one of `COLOURS`."""
        choice, tokens = self.turn.choices[self.choice], []
        forced = forced_positions(self.turn, self.choice)
        for position in range(max(0, start), min(stop, self.length)):
            at = position - self.prompt_length
            if at < 0:
                token_id = self.turn.prompt_token_ids[position]
                tokens.append(LensToken(position, token_id, self._text(token_id), "prompt"))
                continue
            then = choice.logprobs[at] if self.has_logprobs else None
            now = self.now[at] if self.now else None
            kind = "forced" if at in forced else "sampled"
            token_id = choice.token_ids[at]
            text = self._text(token_id)
            tokens.append(LensToken(position, token_id, text, kind, then, now, colour_class(colour, then, now)))
        return tokens

    def _text(self, token_id: int) -> str:
        return f"\u27e8{token_id}\u27e9" if self.texts is None else self.texts.text(token_id)


def forced_positions(turn: Turn, choice: int) -> Collection[int]:
    """Return the positions in an answer at which the sampling constraint allowed a single token.

    The engine stored a set of one token there, or the token has the probability 1 under a grammar.
    """
    answer = turn.choices[choice]
    if answer.stored_sets is not None:
        return {position for position, ids in enumerate(iterate_sets(answer.stored_sets)) if len(ids) == 1}
    if turn.sampling.grammar is None:
        return ()
    return {position for position, logprob in enumerate(answer.logprobs) if logprob == 0.0}


def colour_class(colour: str, then: float | None, now: float | None) -> str:
    """Return the CSS class of a sampled token, or an empty text if a needed probability is not known.

    Args:
        colour: the colour scheme, one of `COLOURS`.
        then: logprob of the token at the time of the call.
        now: logprob of the token under the weights of another version.
    """
    if colour == "change":
        if then is None or now is None:
            return ""
        size = sum(abs(now - then) >= bound for bound in _CHANGES)
        return "z" if not size else f"{'u' if now > then else 'd'}{size}"
    logprob = now if colour == "now" else then
    if logprob is None:
        return ""
    return f"l{sum(logprob < math.log(share) for share in _LEVELS)}"
