"""Changes of documents, texts and bytes that a stranger, or a damaged disk, could have made."""

import json
import math
from collections.abc import Sequence
from random import Random
from typing import Any

WORDS = (
    "", " ", "x", "b", "n", "c", "h", "dense", "relu", "conv2d", "paper", "alpha_beta", "fc1", "__class__",
    "../../etc/passwd",
    "(__import__('os').system('touch PWNED'), relu)[1]", "'\"\\", "a\nb\r\nc", "\x00\x07\x1b[31m\x7f", "\ud800",
    "\u202e\u2028",
    "None", "nan", "1e999", "{0}{name}%s", "<script>alert(1)</script>", "\"]; x [", "=1+1", "слой 层 😀",
)  # fmt: skip

_LONG = ("x" * 100_000, "long " * 20_000, "a'b\"" * 25_000)

NUMBERS: tuple[int | float, ...] = (
    0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, -1, -2, -(10**9), 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1,
    2**63, 2**64, 10**30,
    10**400, -(10**400), 0.0, -0.0, 0.5, 1.5, -1.5, 1e-320, 1e-9, 1e12, 1e300, 1.7e308, math.inf, -math.inf, math.nan,
)  # fmt: skip


def word(rng: Random) -> str:
    """Return a text of any kind; a long one now and then."""
    return rng.choice(_LONG) if rng.random() < 0.03 else rng.choice(WORDS)


def atom(rng: Random) -> Any:
    """Return a value of any type that JSON has."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.6:
        return word(rng)
    if kind < 0.75:
        return rng.choice((None, True, False))
    if kind < 0.85:
        return [atom(rng) for _ in range(rng.randrange(4))]
    if kind < 0.95:
        return {word(rng): atom(rng) for _ in range(rng.randrange(4))}
    return nested(rng.choice((5, 50, 400)), rng)


def nested(depth: int, rng: Random) -> Any:
    """Return arrays or objects within one another."""
    found: Any = rng.choice((1, None, "x"))
    for _ in range(depth):
        found = [found] if rng.random() < 0.5 else {"a": found}
    return found


def change_document(document: Any, rng: Random, changes: int) -> Any:
    """Change a document in place, a number of times; return it, or what stands in its place."""
    for _ in range(changes):
        places = list(_places(document))
        if not places:
            return atom(rng)
        holder, key = rng.choice(places)
        document = _changed(document, holder, key, places, rng)
    return document


def _places(document: Any) -> Any:
    pending = [document]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            for key, value in item.items():
                yield item, key
                if isinstance(value, dict | list):
                    pending.append(value)
        elif isinstance(item, list):
            for key, value in enumerate(item):
                yield item, key
                if isinstance(value, dict | list):
                    pending.append(value)


def _changed(document: Any, holder: Any, key: Any, places: Sequence[tuple[Any, Any]], rng: Random) -> Any:
    old = holder[key]
    kind = rng.random()
    if kind < 0.25:
        holder[key] = atom(rng)
    elif kind < 0.5:
        holder[key] = near(old, rng)
    elif kind < 0.6:
        del holder[key]
    elif kind < 0.7:
        if isinstance(holder, dict):
            holder[word(rng)] = old if rng.random() < 0.5 else atom(rng)
        else:
            holder.insert(rng.randrange(len(holder) + 1), old if rng.random() < 0.7 else atom(rng))
    elif kind < 0.8 and isinstance(holder, dict):
        del holder[key]
        holder[word(rng)] = old
    elif kind < 0.9 and isinstance(holder, list):
        rng.shuffle(holder)
    else:
        # What another place holds: of the right type often, and wrong all the same.
        other, at = rng.choice(places)
        value = other.get(at) if isinstance(other, dict) else (other[at] if at < len(other) else None)
        text = json.dumps(value)
        if len(text) < 5000:
            holder[key] = json.loads(text)
    return document


def near(value: Any, rng: Random) -> Any:
    """Return a value of the same type as another."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, value * 2, -value, value // 2, 0, 1, *NUMBERS[:20]))
        case float():
            return rng.choice((value * 2, -value, value + 1, *NUMBERS))
        case str():
            return rng.choice((value + "x", value[:-1], value.upper(), value * 2, word(rng)))
        case list():
            return rng.choice(([], value[:-1], value + value, value[::-1]))
        case dict():
            return {} if rng.random() < 0.3 else dict(reversed(value.items()))
    return atom(rng)


def change_text(text: str, rng: Random) -> bytes:
    """Return a text as bytes, some of it damaged."""
    data = text.encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.4:
        return data[: rng.randrange(len(data) + 1)]
    if kind < 0.6:
        return change_bytes(data, rng)
    if kind < 0.7:
        return b"\xef\xbb\xbf" + data
    if kind < 0.8:
        return b"[" * rng.choice((10, 900, 5000, 200_000)) + data
    at = rng.randrange(len(data) + 1)
    more = rng.choice(
        (b"1e999", b"9" * 5000, b"-", b"NaN", b"Infinity", b'"', b"\\u0000", b"{", b"\xff\xfe", b"\x00", b",,")
    )
    return data[:at] + more + data[at + rng.randrange(3) :]


def change_bytes(data: bytes, rng: Random) -> bytes:
    """Return bytes of which a few were changed, taken out, repeated or cut off."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not found:
            break
        at = rng.randrange(len(found))
        kind = rng.random()
        if kind < 0.35:
            found[at] ^= 1 << rng.randrange(8)
        elif kind < 0.6:
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind < 0.7:
            del found[at : at + rng.choice((1, 2, 4, 16, 100))]
        elif kind < 0.8:
            found[at:at] = found[at : at + rng.choice((1, 4, 16, 64))]
        elif kind < 0.9:
            width = rng.choice((2, 4, 8))
            value = rng.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)) % (1 << (8 * width))
            found[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
        else:
            del found[at:]
    return bytes(found)
