"""The agent's only tool: a calculator for whole numbers.

The agent: its system prompt and its tool, with the loop that all examples share.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from example_parts.react import ERROR, Agent, WrongCall, definition, only_argument

NAME, PARAMETER = "calculator", "expression"
LENGTH_MAX = 64
"""Maximum number of characters of an expression."""
DEFINITIONS = [definition(NAME, "Calculate with whole numbers.", PARAMETER, "For example 24 + 13.")]

_BY_SIGN: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Calculator:
    """Calculator with + - * and brackets."""

    def call(self, name: str, arguments: str) -> str:
        """Execute a model's call. For an invalid call return a text that begins with `ERROR`."""
        try:
            if name != NAME:
                raise WrongCall(f"no tool {name}")
            return str(calculate(only_argument(arguments, PARAMETER)))
        except WrongCall as problem:
            return f"{ERROR}{problem}"


def calculate(expression: str) -> int:
    """Return the value of an expression. Raises `WrongCall` unless it is a sum, difference or product of whole
    numbers."""
    if len(expression) > LENGTH_MAX:
        raise WrongCall(f"more than {LENGTH_MAX} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):  # a null character is a ValueError
        raise WrongCall("not an expression") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BY_SIGN:
        return _BY_SIGN[type(node.op)](_value(node.left), _value(node.right))
    raise WrongCall("only whole numbers with + - * and brackets")


SYSTEM = "Solve the problem: one thought, one call, again. End with Answer and the number."
TURNS_MAX = 8
"""Limit of model calls: three calls, each repeated, an answer, and one invalid call."""
AGENT = Agent(SYSTEM, DEFINITIONS, TURNS_MAX)
