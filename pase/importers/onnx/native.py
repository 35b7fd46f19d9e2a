"""ONNX's own C++, which is handed what a stranger's file says: in a process of its own, with limits.

An operator that its shape inference does not expect can end the whole process (an assertion, an access out of bounds).
This module is also that process: started as a script, it loads ONNX's extension and nothing else.
"""

import marshal
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import IO, Any

_CPU_S = 30
_WALL_S = 120.0
_MEMORY_BYTES = 4 << 30
"""Limits of one request: time, and memory of the process."""

_LENGTH_BYTES = 8
_EXTENSION = "onnx_cpp2py_export"


def native() -> "Native":
    """Return the process, started; MissingExtraError where ONNX is not installed."""
    from pase.importers.front_end import framework  # the process itself has no PaSE

    return Native(str(framework(f"onnx.{_EXTENSION}", "onnx").__file__))


class NativeError(Exception):
    """What ONNX said of a request, or how the process ended."""


class Native:
    """The process. It is started at once, so that it loads while the caller goes on; end it with `close`."""

    def __init__(self, extension: str) -> None:
        # Neither the environment nor installed packages are looked at: this takes 0.04 s.
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

    def infer(
        self,
        operator: tuple[str, int, str],
        node: bytes,
        types: dict[str, bytes],
        data: dict[str, bytes],
        opsets: dict[str, int],
        ir_version: int,
    ) -> dict[str, bytes] | None:
        """Return the types of an operator's results by name, all messages serialised; None for an unknown operator.

        operator: name, version and domain. Raises NativeError.
        """
        found: dict[str, bytes] | None = self._ask(("infer", operator, node, types, data, opsets, ir_version))
        return found

    def inline(self, model: bytes) -> bytes:
        """Return a model with its functions written out; NativeError where they cannot be."""
        found: bytes = self._ask(("inline", model))
        return found

    def _ask(self, request: tuple[Any, ...]) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        text = marshal.dumps(request)
        try:
            process.stdin.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            process.stdin.flush()
            answer = self._read(process.stdout, int.from_bytes(self._read(process.stdout, _LENGTH_BYTES), "little"))
        except BrokenPipeError:
            raise NativeError(self._ended()) from None
        is_found, found = marshal.loads(answer)
        if not is_found:
            raise NativeError(found)
        return found

    def _read(self, stream: IO[bytes], count: int) -> bytes:
        """Return so many bytes; NativeError where they do not come."""
        found = bytearray()
        end_s = time.monotonic() + _WALL_S
        while len(found) < count:
            if not select.select([stream], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise NativeError(f"ONNX's own code took more than {_WALL_S:g} s for it")
            piece = os.read(stream.fileno(), count - len(found))
            if not piece:
                raise NativeError(self._ended())
            found += piece
        return bytes(found)

    def _ended(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            return f"ONNX's own code took more than {_CPU_S} s for it"
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"ONNX's own code ends its process at it ({how})"


def main() -> None:
    """Answer requests from standard input on standard output, one after the other."""
    for limit, most in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has each
            resource.setrlimit(limit, (most, most))
    loader = ExtensionFileLoader(_EXTENSION, sys.argv[1])
    spec = spec_from_loader(_EXTENSION, loader)
    assert spec is not None
    extension = module_from_spec(spec)
    loader.exec_module(extension)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while length := stdin.read(_LENGTH_BYTES):
        request = marshal.loads(stdin.read(int.from_bytes(length, "little")))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        end_s = int(usage.ru_utime + usage.ru_stime) + _CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            answer = marshal.dumps((True, _answer(extension, *request)))
        except Exception as error:  # noqa: BLE001 of C++, of several classes
            answer = marshal.dumps((False, str(error) or type(error).__name__))
        stdout.write(len(answer).to_bytes(_LENGTH_BYTES, "little") + answer)
        stdout.flush()


def _answer(extension: Any, what: str, *request: Any) -> Any:
    if what == "inline":
        return extension.inliner.inline_local_functions(request[0], False)
    (name, version, domain), node, types, data, opsets, ir_version = request
    try:
        schema = extension.defs.get_schema(name, version, domain)
    except Exception:  # noqa: BLE001 a SchemaError of C++
        return None
    return schema._infer_node_outputs(node, types, data, {}, opsets, ir_version)


if __name__ == "__main__":
    main()
