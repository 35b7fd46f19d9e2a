"""Lines of emitted programs, broken as a formatter would break them."""

from collections.abc import Sequence

WIDTH = 120
INDENT = "    "


def call(head: str, arguments: Sequence[str], *, tail: str = ")", indent: str = INDENT) -> list[str]:
    """Return the lines of ``head(arguments)``: in one line, on a line of their own, or one on each line."""
    line = f"{indent}{head}({', '.join(arguments)}{tail}"
    if len(line) <= WIDTH:
        return [line]
    inner = indent + INDENT
    joined = f"{inner}{', '.join(arguments)}"
    if len(joined) <= WIDTH:
        return [f"{indent}{head}(", joined, f"{indent}{tail}"]
    return [f"{indent}{head}(", *(f"{inner}{argument}," for argument in arguments), f"{indent}{tail}"]


def together(assignments: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """Return assignments of calls (target, function, arguments): all in one line where they fit, else one by one."""
    targets = ", ".join(target for target, _, _ in assignments)
    values = ", ".join(f"{function}({', '.join(arguments)})" for _, function, arguments in assignments)
    line = f"{INDENT}{targets} = {values}"
    if not assignments or len(line) <= WIDTH:
        return [line] if assignments else []
    return [line for target, function, arguments in assignments for line in call(f"{target} = {function}", arguments)]


def with_comment(lines: list[str], comment: str) -> list[str]:
    """Return lines with a comment: behind a single line that has room, before them otherwise."""
    if not comment:
        return lines
    if len(lines) == 1 and len(lines[0]) + 4 + len(comment) <= WIDTH:
        return [f"{lines[0]}  # {comment}"]
    return [f"{INDENT}# {comment}", *lines]


def devices_argument(devices: Sequence[int]) -> tuple[str, list[str]]:
    """Return ``devices=[…]`` as one argument, and as the lines of one that is wrapped."""
    numbers = [str(device) for device in devices]
    rows: list[str] = []
    for number in numbers:
        if rows and len(rows[-1]) + len(number) + 2 <= WIDTH - 3 * len(INDENT):
            rows[-1] += f" {number},"
        else:
            rows.append(f"{number},")
    inner = [f"{INDENT * 3}{row}" for row in rows]
    wrapped = [f"{INDENT * 2}devices=[", *inner, f"{INDENT * 2}],"]
    return f"devices=[{', '.join(numbers)}]", wrapped
