"""Run C libraries on untrusted input (ONNX's and HDF5's), each in a separate process with limits.

Unexpected input can crash the whole process (an assertion, an access out of bounds) or exhaust the memory. This module
is also the program of those processes: run as a script, it loads the one library, and nothing of PaSE.
"""

import marshal
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any


class NativeError(Exception):
    """Error message of a library, or how its process ended."""


def _limited(memory_bytes: int) -> None:
    """Limit the memory of this process, and leave no core dump."""
    for limit, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has each
            resource.setrlimit(limit, (most, most))


# -- ONNX: requests to a persistent process

_CPU_S = 10
_MEMORY_BYTES = 1 << 29
"""Limits of one request: time, and memory of the process."""

_EXTENSION = "onnx_cpp2py_export"


def native() -> "Native":
    """Return the process, started; MissingExtraError where ONNX is not installed."""
    from pase.importers.front_end import framework  # the process itself has no PaSE

    return Native(str(framework(f"onnx.{_EXTENSION}", "onnx").__file__))


class Native:
    """The process, started immediately so that it loads in the background; `close` ends it."""

    def __init__(self, extension: str) -> None:
        # Skipping the environment and installed packages reduces the start to 0.04 s.
        command = [sys.executable, "-I", "-S", __file__, extension]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def __enter__(self) -> "Native":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def ask(self, what: str, *request: Any) -> Any:
        """Return the result of a function of the process, `infer` or `inline`; NativeError on failure."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            marshal.dump((what, *request), process.stdin)
            process.stdin.flush()
            is_found, found = marshal.load(process.stdout)
        except (BrokenPipeError, EOFError):
            status = process.wait()
            if status == -signal.SIGPROF:
                raise NativeError(f"ONNX's own code took more than {_CPU_S} s for it") from None
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise NativeError(f"ONNX's own code ends its process at it ({how})") from None
        if not is_found:
            raise NativeError(found)
        return found


def _answer(path: str) -> None:
    """Answer requests from standard input on standard output, one after the other."""
    _limited(_MEMORY_BYTES)
    loader = ExtensionFileLoader(_EXTENSION, path)
    spec = spec_from_loader(_EXTENSION, loader)
    assert spec is not None
    extension = module_from_spec(spec)
    loader.exec_module(extension)
    with suppress(EOFError):
        while True:
            what, *request = marshal.load(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_PROF, _CPU_S)
            try:
                answer = True, _FUNCTIONS[what](extension, *request)
            except Exception as error:  # noqa: BLE001 of C++, of several classes
                answer = False, str(error) or type(error).__name__
            marshal.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def infer(
    extension: Any,
    operator: tuple[str, int, str],
    node: bytes,
    types: dict[str, bytes],
    data: dict[str, bytes],
    opsets: dict[str, int],
    ir_version: int,
) -> Any:
    """Return the serialised types of an operator's results by name; None for an unknown operator.

    operator: its name, version and domain.
    """
    try:
        schema = extension.defs.get_schema(*operator)
    except Exception:  # noqa: BLE001 a SchemaError of C++
        return None
    return schema._infer_node_outputs(node, types, data, {}, opsets, ir_version)


def inline(extension: Any, model: bytes) -> Any:
    """Return a model with its functions inlined."""
    return extension.inliner.inline_local_functions(model, False)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"infer": infer, "inline": inline}


# -- HDF5: a copy of only the arrays of a file
#
# Links, external data, filters and cycles are rejected, so that no more is read than the file contains.

_COPY_BYTES = 4 << 30
"""Memory allowed in addition to twice the size of the file."""

_MAX_DEPTH = 64
_LONGEST_TEXT = 1000


def copy_arrays(source: Path, target: Path) -> None:
    """Copy the arrays of an HDF5 file to another one; NativeError where that is not possible, or takes too long."""
    command = [sys.executable, "-P", __file__, str(source), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60 + source.stat().st_size / 5e6, check=False)
    except subprocess.TimeoutExpired:
        raise NativeError("it takes too long") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        is_told = lines and done.returncode > 0
        raise NativeError(lines[-1] if is_told else f"reading them ended in signal {-done.returncode}")


def _copy_file(source: str, target: str) -> None:
    """Copy the arrays of a file; end with one line on standard error where that is not possible."""
    _limited(_COPY_BYTES + 2 * Path(source).stat().st_size)
    import h5py

    try:
        with h5py.File(source, "r") as old, h5py.File(target, "w") as new:
            _copy(h5py, old, new, set(), 0)
    except Exception as error:  # noqa: BLE001 of C, of many classes
        sys.exit(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _copy(h5py: Any, old: Any, new: Any, seen: set[int], depth: int) -> None:
    address = int(h5py.h5o.get_info(old.id).addr)
    if address in seen or depth > _MAX_DEPTH:
        raise ValueError(f"group {old.name!r} is nested in itself, or too deeply")
    seen.add(address)
    _copy_texts(old, new)
    for name in old:
        if not isinstance(old.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{name!r} is a link")
        item = old[name]
        if isinstance(item, h5py.Group):
            _copy(h5py, item, new.create_group(name), seen, depth + 1)
            continue
        if not isinstance(item, h5py.Dataset) or item.dtype.kind not in "fiubV" or item.dtype.hasobject:
            raise ValueError(f"{name!r} is not an array of numbers")
        if item.is_virtual or item.external or item.id.get_create_plist().get_nfilters():
            raise ValueError(f"{name!r} is stored in another file, or is compressed")
        if item.size * item.dtype.itemsize > item.id.get_storage_size():
            raise ValueError(f"{name!r} claims the shape {item.shape}, more than the file holds")
        _copy_texts(item, new.create_dataset(name, data=item[()]))


def _copy_texts(old: Any, new: Any) -> None:
    """Copy the attributes that are short texts: Keras notes types there."""
    for key, value in old.attrs.items():
        if isinstance(value, str) and len(value) <= _LONGEST_TEXT:
            new.attrs[key] = value


if __name__ == "__main__":
    (_answer if len(sys.argv) == 2 else _copy_file)(*sys.argv[1:])
