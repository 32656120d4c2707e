"""Score of the test's bench: a number that follows from the answer's text."""

from __future__ import annotations


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiouAEIOU" for letter in text) / len(text) if text else 0.0
