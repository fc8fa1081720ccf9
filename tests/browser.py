"""A headless Chromium for tests, driven through chromedriver's HTTP interface; nothing but the standard library.

`python tests/browser.py report.html picture.png [WIDTH HEIGHT]` takes a picture of the top of a page, for the docs.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage")


def missing() -> str | None:
    """Why no browser can be driven here, or None."""
    if not any(shutil.which(name) for name in CHROMIUM):
        return "needs Chromium: apt-get install chromium chromium-driver"
    return None if shutil.which("chromedriver") else "needs chromedriver: apt-get install chromium-driver"


class Browser:
    """One page in one fresh profile. Use as a context manager."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._profile = tempfile.mkdtemp(prefix="flashgen-browser-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._session = ""
        arguments = [*FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}", "about:blank"]
        options = {"args": arguments + (["--force-dark-mode"] if dark else []), "binary": next(filter(None, map(shutil.which, CHROMIUM)))}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self._session = self._started({"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        # A page that is narrower than a window may be: phones.
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        if dark:
            self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._session:
                self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(10)
            shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path) -> None:
        """Load a file; what the browser did before does not count."""
        self.complaints()
        self.requests()
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of a script's `return`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def press(self, selector: str, *keys: str) -> None:
        """Type keys into an element."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(found.values()))}/value", {"text": "".join(keys)})

    def complaints(self) -> list[str]:
        """Errors and warnings of the console so far."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"}) if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._call("POST", "/se/log", {"type": "performance"})]
        asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith(("chrome://", "chrome-untrusted://", "data:"))]

    def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page, or of the window."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _started(self, wanted: dict[str, Any]) -> Any:
        for _ in range(100):
            try:
                return self._call("POST", None, wanted)
            except (ConnectionError, urllib.error.URLError) as problem:
                if isinstance(problem, urllib.error.HTTPError):
                    raise
                time.sleep(0.1)
        raise RuntimeError("chromedriver did not start within 10 s")

    def _call(self, method: str, path: str | None, body: dict[str, Any] | None = None) -> Any:
        address = f"{self._address}/session" + ("" if path is None else f"/{self._session}{path}")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as problem:
            raise RuntimeError(f"{method} {path}: {problem.read().decode(errors='replace')[:2000]}") from None


def main(page: str, picture: str, width: str = "1280", height: str = "1130") -> None:
    """A picture of the top of a page."""
    with Browser(int(width), int(height)) as browser:
        browser.open(Path(page))
        browser.picture(Path(picture), whole=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
