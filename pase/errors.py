"""The exceptions that PaSE raises for anything that a user can cause.

One subclass for each stage, so that a caller can tell a bad model from a bad plan. The text of every
error says what was found, what was expected and what to do next; the command line prints it as one
line and exits with status 1. Violations of PaSE's own invariants are `assert`, never one of these.
"""

import difflib
import re
from collections.abc import Iterable

_MOST_CHARACTERS = 1000
"""Of a message."""

_MOST_OF_PART = 200
"""Characters of what is quoted in a message, or has no space in it: a name, a path, a piece of a file."""

_PARTS = re.compile(
    r"""(?<![\w\\])(?:'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")|\S{200,}""",
    re.DOTALL,
)


class PaseError(Exception):
    """Base of every error that PaSE raises on purpose.

    Its message is one line of printable characters, at most 1,000 of them: names come from anywhere and are put into
    messages whole, so that what shortens them stands here and cannot be forgotten.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class GraphError(PaseError):
    """A computation graph is not well formed."""


class ModelError(PaseError):
    """A model cannot be found, built or imported."""


class MachineError(PaseError):
    """A machine description is unknown or not usable."""


class ConfigurationError(PaseError):
    """No usable configuration exists for the number of devices that was asked for."""


class CostError(PaseError):
    """A cost model is unknown, or cannot cost what it was given."""


class TablesError(PaseError):
    """Cost tables, or a file that holds them, are not well formed."""


class SolverError(PaseError):
    """The solver was asked for something that it cannot do."""


class MemoryLimitError(PaseError):
    """No strategy fits the memory that devices have."""


class PlanError(PaseError):
    """A plan file cannot be read, or what it says is not consistent."""


class EmitError(PaseError):
    """A plan cannot be written as a program."""


class ExportError(PaseError):
    """A plan cannot be written in the format that was asked for."""


class DatasetError(PaseError):
    """Data to train on are unknown, cannot be read, or are not what a model reads."""


class ProgramError(PaseError):
    """A parallel program cannot be built or run."""


class PrimitiveError(PaseError):
    """A movement of data between workers does not fit their partitions, or a kernel's halo cannot be worked out."""


class IntegratedError(PaseError):
    """The integrated model, batch and domain parallelism does not fit a network, a grid or a batch."""


class SimulationError(PaseError):
    """A training step cannot be simulated as asked."""


class CalibrationError(PaseError):
    """A machine cannot be measured, or what was measured gives no machine."""


class TrainingError(PaseError):
    """A training across workers cannot be set up, or cannot go on."""


class MissingExtraError(PaseError):
    """A feature needs an optional dependency that is not installed; extra: the one of PaSE's extras that brings it."""

    extra: str = ""


def missing_extra(what: str, extra: str, *, also: str = "") -> MissingExtraError:
    """Return the error for what needs the packages of one of PaSE's extras.

    PaSE is not on PyPI, where another project has its name: no line of pip's can be given that is right everywhere.

    Args:
        what: a sentence that says what needs which package.
        extra: the name of the extra.
        also: what else there is to say: another way out, the error that was met.
    """
    error = MissingExtraError(f"{what}; PaSE's extra {extra!r} brings it, and 'pase doctor' says what to type{also}")
    error.extra = extra
    return error


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that is not in a registry: the nearest ones first, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"unknown {what} {name!r}: {hint}known {what}s are {', '.join(names)}"


def _one_line(text: str) -> str:
    """Return a message as one line, what is too long in it shortened in its middle."""
    text = _PARTS.sub(lambda found: _shortened(found[0], _MOST_OF_PART), text)
    text = " ".join(text.splitlines())
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return _shortened(text, _MOST_CHARACTERS)


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 1]}…{text[-end:]}"
