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


def duration(time_s: float) -> str:
    """Return a time with a fitting unit: 12 ms, 3.4 s, 2 min 5 s."""
    if time_s < 1:
        return f"{time_s * 1000:.0f} ms"
    if time_s < 100:
        return f"{time_s:.1f} s"
    return f"{int(time_s) // 60} min {int(time_s) % 60} s"
