"""A headless chromium that tests drive over the DevTools protocol, through two pipes."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE = 60.0  # seconds for one answer
KEYS = {
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Tab": 9,
    "Home": 36,
    " ": 32,
    "End": 35,
}


class Browser:
    """One browser with one page."""

    def __init__(self, home: Path) -> None:
        asked, answered = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += ["--no-first-run", "--disable-extensions", f"--user-data-dir={home}"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{asked[0]} 4>&{answered[1]}', CHROMIUM, *flags],
            pass_fds=(asked[0], answered[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(asked[0])
        os.close(answered[1])
        self._out, self._in = asked[1], answered[0]
        self._rest, self._numbers, self._session = b"", itertools.count(1), None
        self.problems: list[str] = []  # what the console and the content security policy said
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events before it are noted."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        if event.get("method") in kinds:
            self.problems.append(json.dumps(event["params"])[:500])

    def size(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[wish])

    def scripts(self, on: bool) -> None:
        """Allow or forbid the page's own scripts from the next page on."""
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def open(self, path: Path, fragment: str = "") -> None:
        """Show a file, and forget what the console said about the one before."""
        self.call("Page.navigate", url="about:blank")
        self.problems.clear()
        self.call("Page.navigate", url=path.as_uri() + fragment)
        while self.value("document.readyState") != "complete":
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, wanted: Any) -> None:
        """Wait until an expression has a value: some events of a page come a little later."""
        end = time.monotonic() + PATIENCE / 6
        while (found := self.value(expression)) != wanted:
            assert time.monotonic() < end, f"{expression} is {found!r}; expected {wanted!r}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key of :data:`KEYS`, or a letter."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
