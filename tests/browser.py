"""Pages of the console in headless Chromium."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright

from tests.time_limits import TEST_TIMEOUT_S

expect.set_options(timeout=TEST_TIMEOUT_S * 1000)
DESKTOP = 1280, 800
PHONE = 390, 844
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Return the path of Chromium; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed; Debian has it in the package chromium")
    return found


@contextlib.contextmanager
def run_browser() -> Iterator[Browser]:
    """Run Chromium while the block runs."""
    path = find_chromium()
    # As root, Chromium does not start with its sandbox.
    words = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=words)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class ConsolePage:
    """One page of the console, what it has logged, and the addresses that it has requested."""

    page: Page
    url: str
    messages: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    views: list[Response] = field(default_factory=list)  # answers with the state of the cluster

    def open(self, fragment: str) -> None:
        """Open a page, such as "#/findings"."""
        self.page.goto(f"{self.url}/console/{fragment}")

    def check(self) -> None:
        """Check that the page has logged no error, and has loaded no files from other hosts."""
        assert self.messages == []
        assert [each for each in self.requested if not each.startswith(f"{self.url}/")] == []

    def save(self, path: Path) -> None:
        """Save a picture of the window."""
        self.page.screenshot(path=path)


@contextlib.contextmanager
def open_console(
    browser: Browser, url: str, *, size: tuple[int, int] = DESKTOP, is_dark: bool = False
) -> Iterator[ConsolePage]:
    """Yield a new window for the console of a gateway; at the end check its errors and requests."""
    width, height = size
    with browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if is_dark else "light",
        reduced_motion="reduce",
    ) as context:
        context.set_default_timeout(TEST_TIMEOUT_S * 1000)
        page = ConsolePage(context.new_page(), url)
        page.page.on("console", lambda each: page.messages.append(each.text))
        page.page.on("pageerror", lambda each: page.messages.append(str(each)))
        page.page.on("request", lambda each: page.requested.append(each.url))
        page.page.on(
            "response",
            lambda each: page.views.append(each) if each.url.endswith("/cluster") else None,
        )
        yield page
        page.check()
