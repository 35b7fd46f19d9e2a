"""Format names and numbers for people: names may contain any character, numbers get three significant digits."""

from collections.abc import Callable, Sequence

LONGEST = 60
"""Maximum number of characters of a name in a drawing or a table."""


def visible(name: str, *, keeping: str = "") -> str:
    r"""Return a name with invisible characters (control characters, lone surrogates) escaped, as in \x1b.

    Args:
        name: Any text.
        keeping: Characters that stay as they are.
    """
    return "".join(c if c.isprintable() or c in keeping else c.encode("unicode_escape").decode("ascii") for c in name)


def short(name: str) -> str:
    """Return a name as one short line."""
    shown = visible(name)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def shortened(text: str, room: float, width: Callable[[str], float] = len, *, narrowest: float = 1.0) -> str:
    """Shorten a text to a maximum width by replacing its middle with an ellipsis.

    The beginning and the end remain, since that is where names of layers differ.

    Args:
        text: The text.
        room: Maximum width.
        width: Returns the width of a text.
        narrowest: Width of the narrowest common character.
    """
    # Characters that cannot fit in any case need not be measured.
    most = int(room / narrowest) + 1
    if len(text) <= 4 * most and width(text) <= room:
        return text
    for kept in range(min(most, len(text)), 0, -1):
        found = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
        if width(found) <= room:
            return found
    return "…"


def listed(names: Sequence[str], *, most: int = 8) -> str:
    """Return the first names as a comma-separated list, with the number of omitted ones."""
    shown = ", ".join(short(name) or repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def quantity(value: float, unit: str) -> str:
    """Return a number with three digits and a decimal prefix: 1.23 GFLOP."""
    if value == 0:
        return f"0 {unit}"
    prefixes = ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E", "Z")
    exponent = 0
    while abs(value) >= 999.5 and exponent < len(prefixes) - 5:
        value, exponent = value / 1000, exponent + 1
    while abs(value) < 0.9995 and exponent > -4:
        value, exponent = value * 1000, exponent - 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {prefixes[exponent + 4]}{unit}"


def large(value: int, unit: str = "") -> str:
    """Return a whole number of any size: 1,234, with a unit 1.23 kB; 1.2e+34."""
    if value < (1e21 if unit else 1e6):
        return quantity(value, unit) if unit else f"{value:,}"
    digits = str(value)
    return f"{digits[0]}.{digits[1]}e+{len(digits) - 1} {unit}".rstrip()


def signed(value: float, unit: str) -> str:
    """Return a quantity with its sign, except 0: +1.23 GFLOP."""
    return f"{'-' if value < 0 else '+' if value else ''}{quantity(abs(value), unit)}"


def duration(time_s: float) -> str:
    """Return a time with a fitting unit: 12 ms, 3.4 s, 2 min 5 s."""
    if time_s < 1:
        return f"{time_s * 1000:.0f} ms"
    if time_s < 100:
        return f"{time_s:.1f} s"
    return f"{int(time_s) // 60} min {int(time_s) % 60} s"


def clock(time_s: float) -> str:
    """Return a time as a clock shows it: 0:07, 12:34, 1:02:03."""
    minutes, seconds = divmod(int(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def binary(size_bytes: int) -> str:
    """Return a size with a binary unit: 16 KiB."""
    unit, name = next(((2**n, name) for n, name in _BINARY if size_bytes >= 2**n), (1, "B"))
    return f"{size_bytes / unit:.3g} {name}"


_BINARY = (30, "GiB"), (20, "MiB"), (10, "KiB")


def number(value: float) -> str:
    """Return a number with three significant digits, without an exponent where that is readable."""
    return f"{float(f'{value:.3g}'):,g}" if 1e-3 <= value < 1e6 else f"{value:.3g}"


def percentage(value: float | None, digits: int = 1) -> str:
    """Return a share in per cent, "" for none."""
    return "" if value is None else f"{value:.{digits}%}"


def percent(fraction: float) -> str:
    """Return a signed part of a hundred with two digits: "+1.2%"."""
    value = 100 * fraction
    if 0 < abs(value) < 1e-4:
        return f"{'+' if value > 0 else '-'}<0.0001%"
    return f"{value:+.0f}%" if abs(value) >= 9.95 else f"{value:+.2g}%"
