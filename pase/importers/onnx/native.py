"""ONNX's own C++, which is handed what a stranger's file says: in a process of its own, with limits.

An operator that its shape inference does not expect can end the whole process (an assertion, an access out of bounds).
This module is also that process: started as a script, it loads ONNX's extension and nothing else.
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
from typing import Any

_CPU_S = 10
_MEMORY_BYTES = 1 << 29
"""Limits of one request: time, and memory of the process."""

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

    def ask(self, what: str, *request: Any) -> Any:
        """Return what a function of the process, `infer` or `inline`, answers; NativeError where it does not."""
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
    """Return the types of an operator's results by name, all messages serialised; None for an unknown operator.

    operator: name, version and domain.
    """
    try:
        schema = extension.defs.get_schema(*operator)
    except Exception:  # noqa: BLE001 a SchemaError of C++
        return None
    return schema._infer_node_outputs(node, types, data, {}, opsets, ir_version)


def inline(extension: Any, model: bytes) -> Any:
    """Return a model with its functions written out."""
    return extension.inliner.inline_local_functions(model, False)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"infer": infer, "inline": inline}

if __name__ == "__main__":
    main()
