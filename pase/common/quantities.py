"""Numbers for people: three digits, a prefix, a unit."""


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
    """Return a quantity with its sign, but for 0: +1.23 GFLOP."""
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
    """Return a number with three digits, without an exponent as far as that can be read."""
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
