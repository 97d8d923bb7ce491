"""A real Chromium, driven by its DevTools protocol over a pipe: no driver, no socket, nothing to install beside it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "\t")}


def find() -> str:
    """The browser's path; FileNotFoundError when there is none: a test that needs one must not pass without."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    raise FileNotFoundError("no Chromium on PATH; install one (apt-get install chromium), or leave out -m browser")


class Page:
    """One tab of a headless browser of its own; a context manager. `problems`: errors and refusals the page met."""

    def __init__(self, width: int = 1280, height: int = 900, touch: bool = False) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="quantkit-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [
            find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self._session = 0, b"", ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height, touch=touch)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        os.close(self._out)
        os.close(self._in)
        for _ in range(50):
            try:
                self._profile.cleanup()
                return
            except OSError:  # its other processes are still writing
                time.sleep(0.1)

    def resize(self, width: int, height: int, *, touch: bool = False) -> None:
        """The window's inner size in CSS pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)

    def open(self, url: str) -> None:
        """Go to `url` and wait until it has loaded."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the page again."""
        self.evaluate("window.old = true")
        self.send("Page.reload")
        self.wait("window.old === undefined && document.readyState === 'complete'")

    def press(self, *keys: str) -> None:
        """Press keys, one after another, as a keyboard does."""
        for key in keys:
            code, text = _KEYS[key] if key in _KEYS else (ord(key.upper()) if key.isalnum() else 0, key)
            shared = {"key": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", **shared, **({"text": text} if text else {}))
            self.send("Input.dispatchKeyEvent", type="keyUp", **shared)

    def type(self, text: str) -> None:
        """Text as an input method would put it, Chinese included."""
        self.send("Input.insertText", text=text)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 15.0) -> None:
        """Until the expression is true; TimeoutError when it doesn't become so."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"not so after {seconds:g} s: {expression}; the page shows {self.text()[:400]!r}")
            time.sleep(0.02)

    def text(self) -> str:
        """All text that is shown."""
        return str(self.evaluate("document.body.innerText"))

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result; what the browser tells meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
            self._note(found)

    def _note(self, found: dict[str, Any]) -> None:
        params = found.get("params", {})
        match found.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def _receive(self, seconds: float = 30.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {seconds:g} s")
            data = os.read(self._in, 1 << 16)
            if not data:
                raise RuntimeError("the browser ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))
