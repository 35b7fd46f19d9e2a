"""One browser for a module's tests, and documents opened in it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pase.views.reports.document import render
from tests.report.browser import opened, started

Look = Callable[..., Any]


# Not longer than a module: while it lives, nothing else in this process can run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


@pytest.fixture
def look(browser: Any, tmp_path: Path) -> Iterator[Look]:
    """Return a function that opens a document's report; at the end no page may have complained."""
    with ExitStack() as stack:

        def at(document: dict[str, Any], **context: Any) -> Any:
            path = tmp_path / "report.html"
            path.write_text(render(document), encoding="utf-8")
            return stack.enter_context(opened(browser, path, **context))

        yield at
