"""A real browser for pages: the Chromium of this machine, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ABSENT = "no Chromium is installed (Debian: apt-get install chromium)"
QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser. Where there is none, the test is skipped, or fails where CI is true."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail(ABSENT)
        pytest.skip(ABSENT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        yield browser
        browser.close()


@dataclass
class Shown:
    """A page in the browser, what it said in the console, and what it asked for."""

    page: Page
    messages: list[str]
    requests: list[str]

    def choose(self, control: str, text: str) -> None:
        self.page.select_option(f"#{control}", label=text)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def card(self, key: str) -> str:
        """Value and interval of a card, as tables write them."""
        parts = [f'.card[data-key="{key}"] .{part}' for part in ("value", "interval")]
        return " ".join(self.page.locator(part).inner_text() for part in parts).strip()


def shown(browser: Browser, file: Path, fragment: str = "", **context: Any) -> Shown:
    """Open a file in a context of its own (`context`: options of Playwright's new_context)."""
    page = browser.new_context(**context).new_page()
    found = Shown(page, [], [])
    page.on("console", lambda message: found.messages.append(message.text))
    page.on("pageerror", lambda error: found.messages.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(file.as_uri() + fragment)
    return found
