"""A real browser that is told what to do, by chromedriver: for what needs keys, time or a loss."""

import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.controllers import until
from support.ports import free_port

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


class Browser:
    """One window. Skips the test where there is no browser."""

    def __init__(self) -> None:
        driver = shutil.which("chromedriver")
        if driver is None or not (shutil.which("chromium") or shutil.which("chromium-browser")):
            pytest.skip("needs chromium and chromedriver")
        port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="browser-"))  # for all that both write
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"],
            env={**os.environ, "TMPDIR": str(self._folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._url = f"http://127.0.0.1:{port}"
        until("the driver answers", self._is_up)
        options = {"browserName": "chrome", "goog:chromeOptions": {"args": list(FLAGS)}}
        session = self._told("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self._url += f"/session/{session['sessionId']}"

    def go(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self._told("POST", "/url", {"url": url})

    def says(self, script: str) -> Any:
        """What a script on the page returns."""
        return self._told("POST", "/execute/sync", {"script": script, "args": []})

    def submit(self, text: str) -> None:
        """Into the one field of the form of a page, as a person does."""
        (field,) = self._told("POST", "/element", _by_css("main form input")).values()
        self._told("POST", f"/element/{field}/value", {"text": text})
        (button,) = self._told("POST", "/element", _by_css("main form button")).values()
        self._told("POST", f"/element/{button}/click", {})

    def answer(self, selector: str, text: str) -> str:
        """Click, and answer what the browser then asks: the question."""
        self.says(f"setTimeout(() => document.querySelector({json.dumps(selector)}).click(), 10)")
        until("it asks", self._asks)
        question = str(self._told("GET", "/alert/text", None))
        self._told("POST", "/alert/text", {"text": text})
        self._told("POST", "/alert/accept", {})
        return question

    def close(self) -> None:
        """It ends with its driver."""
        try:
            self._told("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait(60.0)
            until("nothing of it is left", self._is_gone)

    def _is_gone(self) -> bool:
        shutil.rmtree(self._folder, ignore_errors=True)  # its last processes may still write
        return not self._folder.exists()

    def _asks(self) -> bool:
        try:
            return bool(self._told("GET", "/alert/text", None))
        except OSError:
            return False

    def _is_up(self) -> bool:
        try:
            return bool(self._told("GET", "/status", None)["ready"])
        except OSError:
            return False

    def _told(self, method: str, path: str, value: Any) -> Any:
        body = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(self._url + path, method=method, data=body)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return json.load(answer)["value"]


def _by_css(selector: str) -> dict[str, str]:
    return {"using": "css selector", "value": selector}
