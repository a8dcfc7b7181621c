"""What a person does with a page, in a driven browser."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Page:
    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self._command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        self.width(1280)

    def open(self, path: Path, *, scheme: str = "light", width: int = 1280) -> None:
        """From disk; logs of pages before are dropped."""
        self.open_url(path.absolute().as_uri(), scheme=scheme, width=width)

    def open_url(self, url: str, *, scheme: str = "light", width: int = 1280) -> None:
        """From a server; logs of pages before are dropped."""
        for log in ("browser", "performance"):
            self.browser.get_log(log)
        self._command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.width(width)
        self.browser.get(url)
        self.run("localStorage.removeItem('veilstream-theme')")

    def width(self, pixels: int) -> None:
        self._command(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=pixels < 500
        )

    def _command(self, name: str, **options: Any) -> Any:
        return self.browser.execute_cdp_cmd(name, options)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def find(self, css: str) -> Any:
        return self.browser.find_element("css selector", css)

    def leave_by(self, css: str, seconds: float = 10.0) -> None:
        """Click what leads to another page, and wait until that one is there."""
        from selenium.common.exceptions import WebDriverException

        self.run("window.left = false")
        self.find(css).click()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if self.run("return window.left === undefined && document.readyState") == "complete":
                    return
            except WebDriverException:  # between two pages there is none
                pass
            time.sleep(0.05)
        raise AssertionError(f"{css} led to no other page in {seconds:g} s")

    def all(self, css: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", css))

    def texts(self, css: str) -> list[str]:
        return [node.text for node in self.all(css)]

    def point_at(self, css: str, x: float, y: float) -> None:
        """Move the mouse to a place inside an element, as shares of its width and height."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", self.find(css))
        box = self.run("return arguments[0].getBoundingClientRect().toJSON()", self.find(css))
        self._command(
            "Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + x * box["width"], y=box["y"] + y * box["height"]
        )
        self.browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    def nearest(self, chart: str, name: str) -> str:
        """The read-out at the right edge, at a height where a curve of this name is nearest."""
        for share in (0.02 + 0.04 * i for i in range(25)):
            self.point_at(f"{chart} .u-over", 0.999, share)
            text = self.find(f"{chart} .readout .each").text
            if text.startswith(f"{name}, every seed"):
                return str(text)
        raise AssertionError(f"no height is nearest to {name}")

    def serious(self, axe: str, passes: int = 8) -> list[tuple[str, list[str]]]:
        """What axe finds, by rule; more rules than ``passes`` must hold."""
        self.run(axe)
        found = self.browser.execute_async_script("axe.run().then(arguments[0])")
        assert len(found["passes"]) > passes
        return [
            (rule["id"], [node["html"][:200] for node in rule["nodes"]])
            for rule in found["violations"]
            if rule["impact"] in ("serious", "critical")
        ]

    def errors(self) -> list[str]:
        """What the console complained of, since `open`."""
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address that was asked for, since `open`.

        Not what the browser asks itself for its own empty page (`chrome:`).
        """
        found = []
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith("chrome:")]
