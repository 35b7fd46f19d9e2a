"""Python that is written of a plan: names come into it as string literals and nothing else.

The oracle is the program of the same network with names that harm nothing: both must have one syntax tree.
"""

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from pase import Plan, emit
from pase.views.exports import export
from tests.hostile import HOSTILE_NAMES, hostile_plan, tame_plan

WRITERS: dict[str, Callable[[Plan], str]] = {
    "emit": emit,
    "jax": lambda plan: export(plan, "jax").text,
    "torch": lambda plan: export(plan, "torch").text,
}


class _OneByOne(ast.NodeTransformer):
    """Parts assignments that stand in one line because they are short enough: how long names are changes that."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                return [ast.Assign([target], value) for target, value in zip(targets, values, strict=True)]
        return node


def shape(source: str) -> Iterator[str]:
    """Yield what a program does, whatever its variables are called and its strings hold."""
    tree = _OneByOne().visit(ast.parse(source))
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str()):
                yield "text"
            case ast.Constant():
                yield repr(node.value)
            case ast.Name():
                # Those of others, which a program calls, have to be the same.
                yield f"variable {type(node.ctx).__name__}" if node.id in assigned else node.id
            case ast.Attribute():
                yield f".{node.attr}"
            case ast.alias():
                yield f"import {node.name} as {node.asname}"
            case _:
                yield type(node).__name__


def texts(source: str) -> set[str]:
    return {
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and type(node.value) is str
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_hostile_names_change_nothing_but_strings(writer: str) -> None:
    hostile, tame = WRITERS[writer](hostile_plan()), WRITERS[writer](tame_plan())
    assert list(shape(hostile)) == list(shape(tame))
    for source in (hostile, tame):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,60}", node.id)


@pytest.mark.parametrize("writer", WRITERS)
def test_names_are_read_back_from_the_strings(writer: str) -> None:
    assert texts(WRITERS[writer](hostile_plan())) >= set(HOSTILE_NAMES)


@pytest.mark.parametrize("writer", WRITERS)
def test_comments_hold_no_line_of_their_own(writer: str) -> None:
    # A line break of any kind in a comment would make code of what follows it.
    source = WRITERS[writer](hostile_plan())
    assert source.splitlines() == source.removesuffix("\n").split("\n")
    assert all(c.isprintable() or c == "\n" for c in source)


def test_the_oracle_sees_a_difference() -> None:
    assert list(shape("x = f('a')")) == list(shape("y = f('b')"))
    for other in ("x = g('a')", "x = f('a', 'b')", "x = f('a'); import os", "x = f(a)", "x = f(1)"):
        assert list(shape("x = f('a')")) != list(shape(other))
