"""A headless Chromium for tests, and a page in it that tells of everything which should not happen."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
DESKTOP = {"width": 1360, "height": 900}
PHONE = {"width": 360, "height": 740}


def executable() -> str | None:
    """Return the browser that PASE_CHROMIUM names, or the first one on PATH."""
    return os.environ.get("PASE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def unavailable(what: str) -> None:
    """Skip the test, or fail it where PASE_NEED_BROWSER says that a browser belongs here."""
    text = f"{what}; or name a Chromium in PASE_CHROMIUM"
    if os.environ.get("PASE_NEED_BROWSER") == "1":
        pytest.fail(text)
    pytest.skip(text)


@contextmanager
def started() -> Iterator[Any]:
    """Yield a browser; tests that need one are skipped where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("no playwright to drive a browser with: `pip install playwright`")
    path = executable()
    if path is None:
        unavailable(f"no browser to look at the report with, tried {', '.join(NAMES)}: `apt install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass(slots=True)
class Complaints:
    """What a page should not do: warn, fail, fetch, ask."""

    heard: list[str] = field(default_factory=list)

    def listen(self, page: Any, url: str) -> None:
        """Note whatever the page does from now on."""
        page.on("console", lambda message: self._console(message.type, message.text))
        page.on("pageerror", lambda error: self.heard.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self._request(request.url, url))
        page.on("popup", lambda popup: self.heard.append(f"window: {popup.url}"))

    def _console(self, kind: str, text: str) -> None:
        # A violation of the page's policy is one of these errors.
        if kind in ("warning", "error"):
            self.heard.append(f"console {kind}: {text}")

    def _request(self, requested: str, url: str) -> None:
        if requested.split("#")[0] != url:
            self.heard.append(f"request: {requested[:200]}")


@contextmanager
def opened(browser: Any, path: Path, **context: Any) -> Iterator[Any]:
    """Yield the page of a file in a context of its own, and fail at the end if it did what it should not."""
    complaints = Complaints()
    url = path.resolve().as_uri()
    with browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **context}) as own:
        page = own.new_page()
        page.set_default_timeout(8000)
        complaints.listen(page, url)
        page.goto(url)
        yield page
        page.wait_for_timeout(20)
    assert not complaints.heard, "\n".join(complaints.heard)
