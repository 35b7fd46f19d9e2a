"""Why a torch module cannot be traced, in one line: what was found, at which operator, where in the user's source."""

import linecache
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

Explanation = Callable[[BaseException], bool]


def failure(error: BaseException) -> str:
    """Return what is said of an error that `torch.export` raised."""
    place = _place(error)
    for applies, text in _EXPLANATIONS:
        if applies(error):
            return text.format(place=place, operator=_operator(error) or "a branch or loop on a tensor's values")
    return f"the module cannot be traced{place}: {_first_line(error)}"


def is_control_flow(error: BaseException) -> bool:
    """Return whether an error is of control flow that depends on values."""
    return next((text for applies, text in _EXPLANATIONS if applies(error)), "") is _CONTROL_FLOW


_OWN = PurePath(__file__).parents[1]
"""The folder of the front ends."""


def location(stack_trace: str) -> tuple[str, str]:
    """Return ("file.py:12", that line) of the innermost frame of a printed stack that is no framework's own."""
    frames: list[tuple[str, str, str]] = []
    lines = stack_trace.splitlines()
    for i, line in enumerate(lines):
        text = line.strip()
        if text.startswith('File "'):
            file, _, rest = text.removeprefix('File "').partition('", line ')
            following = lines[i + 1].strip() if i + 1 < len(lines) else ""
            frames.append((file, rest.partition(",")[0], following))
    for file, number, source in reversed(frames):
        if not is_framework(file):
            return f"{PurePath(file).name}:{number}", source
    return "", ""


def is_framework(file: str) -> bool:
    """Return whether a file is part of torch, of this package, of Python's library or of no file at all."""
    parts = PurePath(file).parts
    if PurePath(file).is_relative_to(_OWN):
        return True
    if "site-packages" not in parts:
        is_library = PurePath(file).is_relative_to(sysconfig.get_paths()["stdlib"])
        return is_library or file.startswith("<")
    inside = parts[len(parts) - parts[::-1].index("site-packages") :]
    return inside[:1] == ("torch",)


def _place(error: BaseException) -> str:
    """Return " at file:line (source)" of the innermost frame of the user's in a traceback, "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_framework(frame.filename):
            source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f" at {PurePath(frame.filename).name}:{frame.lineno}" + (f" ({source})" if source else "")
    return ""


def _operator(error: BaseException) -> str:
    """Return the operator that was being traced."""
    named = getattr(error, "func", None)
    if named is not None:
        return f"operator {named}"
    frames = error.__traceback__
    found = ""
    while frames is not None:
        candidate: Any = frames.tb_frame.f_locals.get("func")
        if hasattr(candidate, "_schema"):
            found = f"operator {candidate}"
        frames = frames.tb_next
    return found


def _named(*names: str) -> Explanation:
    return lambda error: any(kind.__name__ in names for kind in type(error).__mro__)


def _says(*texts: str) -> Explanation:
    return lambda error: any(text.lower() in str(error).lower() for text in texts)


def _needs_gpu(error: BaseException) -> bool:
    text = str(error).lower()
    is_missing = (
        "not linked with support for",
        "not compiled with cuda",
        "no nvidia driver",
        "no cuda gpus",
        "cuda error",
    )
    return any(part in text for part in is_missing) or ("same device" in text and "cuda" in text)


_GPU = (
    "the module needs a GPU{place}: it moves tensors to a device that is not here; leave out .cuda() and "
    "device='cuda', or take the device of an input, as in torch.zeros(n, device=x.device)"
)
_CONTROL_FLOW = (
    "the module's control flow depends on values{place}: {operator}; tracing has no values: use torch.where, or an "
    "argument of the factory, instead"
)
_SIZES = (
    "a tensor's size depends on values{place}: {operator}; sizes have to be fixed: use a mask, or torch.where, instead"
)

_EXPLANATIONS: tuple[tuple[Explanation, str], ...] = (
    (_needs_gpu, _GPU),
    (_named("DynamicOutputShapeException"), _SIZES),
    (_named("GuardOnDataDependentSymNode", "DataDependentOutputException"), _CONTROL_FLOW),
    (_says("data-dependent", "dynamic control flow", "cannot be called on meta tensors"), _CONTROL_FLOW),
)
"""Texts by what they apply to; the first one wins."""


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line}"
