"""A headless Chromium, driven over W3C WebDriver (https://www.w3.org/TR/webdriver2/) with nothing but `http.client`.

Used by the tests of this folder. Needs `chromium` and `chromedriver` in the path (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
PROGRAMS = ("chromium", "chromedriver")
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
"""WebDriver's characters for these keys."""
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""WebDriver's name for a reference to an element."""


def missing() -> list[str]:
    """The programs that are not there."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class BrowserError(AssertionError):
    pass


class Browser:
    """One window. Selectors are CSS; whatever is looked for is waited for."""

    def __init__(self, connection: http.client.HTTPConnection, session: str) -> None:
        self._connection = connection
        self._session = session

    def open(self, url: str) -> None:
        self._call("POST", "url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """The result of a JavaScript function's body; `arguments[0]` is its first argument."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: object, timeout_s: float = TIMEOUT_S) -> Any:
        """The result of the script, once that is true."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.run(script, *arguments)):
            if time.monotonic() > end_s:
                raise BrowserError(f"not true within {timeout_s:g} s: {script} {arguments}\n{self.text('body')}")
            time.sleep(0.02)
        return value

    def find(self, selector: str) -> str:
        """The first element that is shown."""
        script = "return Array.from(document.querySelectorAll(arguments[0])).find((one) => one.checkVisibility())"
        found: str = self.until(script, selector)[_ELEMENT]
        return found

    def click(self, selector: str) -> None:
        self._call("POST", f"element/{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Replaces what is in a field."""
        element = self.find(selector)
        self._call("POST", f"element/{element}/clear", {})
        self._call("POST", f"element/{element}/value", {"text": text})

    def press(self, keys: str, *, shift: bool = False) -> None:
        """Keys to whatever has the focus, one after the other."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        if shift:
            strokes = [{"type": "keyDown", "value": "\ue008"}, *strokes, {"type": "keyUp", "value": "\ue008"}]
        self._call("POST", "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def text(self, selector: str) -> str:
        """The text of the first such element, as it is shown."""
        text: str = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return text

    def wait_text(self, selector: str, pattern: str) -> str:
        """The text of the last such element, once a part of it matches."""
        script = "return Array.from(document.querySelectorAll(arguments[0])).at(-1)?.innerText ?? ''"
        end_s = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, text := self.run(script, selector)):
            if time.monotonic() > end_s:
                raise BrowserError(f"{selector!r} says {text!r}, and not {pattern!r}")
            time.sleep(0.02)
        assert isinstance(text, str)
        return text

    def focused(self) -> str:
        """The id, or else the text, of the element with the focus."""
        name: str = self.run("const one = document.activeElement; return one.id || one.innerText")
        return name

    def size(self, width: int, height: int) -> None:
        """Sizes of the page, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """The system's theme: `light` or `dark`."""
        self._devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    @contextmanager
    def before_pages(self, script: str) -> Iterator[None]:
        """Run a script in each page that is opened in here, before those of the page."""
        name = self._devtools("Page.addScriptToEvaluateOnNewDocument", {"source": script})["identifier"]
        try:
            yield
        finally:
            self._devtools("Page.removeScriptToEvaluateOnNewDocument", {"identifier": name})

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self._call("GET", "screenshot"))

    def complaints(self) -> list[str]:
        """All that the console said since it was asked last: errors, violations of the policy, files that were not there."""
        return [entry["message"] for entry in self._call("POST", "se/log", {"type": "browser"})]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, command: str, body: dict[str, Any] | None = None) -> Any:
        return call(self._connection, method, f"/session/{self._session}/{command}", body)


def call(connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One command of WebDriver, and its value."""
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    value = json.loads(connection.getresponse().read())["value"]
    if isinstance(value, dict) and "error" in value:
        raise BrowserError(f"{path}: {value['error']}: {value['message'].splitlines()[0]}")
    return value


@contextmanager
def browsing(log: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, which is gone afterwards. `log`: where the driver writes."""
    with driving(log) as port, closing(http.client.HTTPConnection("127.0.0.1", port, timeout=2 * TIMEOUT_S)) as connection:
        session = call(connection, "POST", "/session", {"capabilities": {"alwaysMatch": capabilities()}})["sessionId"]
        try:
            yield Browser(connection, session)
        finally:
            call(connection, "DELETE", f"/session/{session}")


@contextmanager
def driving(log: Path) -> Iterator[int]:
    """A driver, by its port. It wants one port of IPv4 and of IPv6, and ends if another process has either."""
    for _ in range(5):
        with subprocess.Popen(["chromedriver", "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            try:
                line = next((line for line in driver.stdout if "successfully on port" in line), None)
                if line is not None:
                    yield int(re.findall(r"\d+", line)[-1])
                    return
            finally:
                driver.terminate()
    raise AssertionError(f"the driver does not start: {log.read_text()}")


def capabilities() -> dict[str, Any]:
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium's sandbox does not work for root.
    return {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": arguments},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
