"""The system's Chromium, headless, driven through its own driver; or why it cannot be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

INSTALL = "apt-get install chromium chromium-driver (Debian), and npm for uPlot and axe-core"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
REQUIRED = "VEILSTREAM_REQUIRE_BROWSER"


def cannot(why: str) -> None:
    """Skip, or fail where browser tests must run (.ci/run)."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"browser tests must run here: {why} ({INSTALL})")
    pytest.skip(f"no browser: {why} ({INSTALL})")


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A browser with a profile of its own; its log and its requests are kept."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        cannot(f"{'chromium' if browser is None else 'chromedriver'} is not installed")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        cannot("selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield running
    finally:
        running.quit()
