"""The commands as a page: what `--help` says of each, as Markdown."""

from collections.abc import Iterator
from inspect import cleandoc

import click

from pase.cli.main import COMMANDS, PROGRAM, cli

WIDTH = 100


def commands_page(program: str) -> str:
    """Return a table of all commands of a program and a section for each."""
    assert program == PROGRAM, program
    lines = ["| command | what it does |", "| --- | --- |"]
    lines += [f"| [`{PROGRAM} {name}`](#{name}) | {_plain(text)} |" for name, (_, text) in COMMANDS.items()]
    with click.Context(cli, info_name=PROGRAM) as parent:
        for name in COMMANDS:
            command = cli.get_command(parent, name)
            assert command is not None
            lines += ["", *_section(name, command, parent)]
    return "\n".join(lines)


def _section(name: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=WIDTH, terminal_width=WIDTH)
    yield from (f"## {PROGRAM} {name} {{#{name}}}", "")
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        yield from (*_paragraph(paragraph), "")
    usage = " ".join((PROGRAM, name, *command.collect_usage_pieces(context)))
    yield from ("```text", usage, "```", "")
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    yield from ("| option | |", "| --- | --- |")
    yield from (f"| `{flags}` | {_plain(text)} |" for flags, text in filter(None, records))
    if command.epilog:
        yield from ("", _epilog(command.epilog))


def _paragraph(text: str) -> Iterator[str]:
    """Yield the lines of a paragraph; one that click is told not to wrap keeps its lines."""
    if text.startswith("\b\n"):
        yield from ("```text", *text.splitlines()[1:], "```")
    else:
        yield _plain(text)


def _epilog(text: str) -> str:
    """Return the text after the options; an example is code."""
    label, _, example = text.partition(": ")
    return f"{label}:\n\n```text\n{example}\n```" if label == "Example" else _plain(text)


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    line = " ".join(text.split())
    for character in "\\`*_[]<>|":
        line = line.replace(character, f"\\{character}" if character not in "<>|" else f"&#{ord(character)};")
    return line
