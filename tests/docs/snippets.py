"""Python snippets, statement by statement; a comment that is a value says what the expression before it gives."""

import ast
from typing import Any

_NOTHING = object()


def run_snippet(source: str, namespace: dict[str, Any], where: str) -> None:
    """Run a snippet; AssertionError where an expression's value is not the one in the comment behind it."""
    lines = source.splitlines()
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Expr):
            exec(compile(ast.Module([statement], []), where, "exec"), namespace)
            continue
        value = eval(compile(ast.Expression(statement.value), where, "eval"), namespace)
        assert statement.end_lineno is not None
        expected = _said(lines[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode())
        if expected is not _NOTHING:
            assert value == expected, f"{where}: {ast.unparse(statement)} gives {value!r}; the page says {expected!r}"


def _said(comment: str) -> object:
    """The value that a comment says, if it is one."""
    try:
        return ast.literal_eval(comment.strip().removeprefix("#").strip())
    except (ValueError, SyntaxError):
        return _NOTHING
