"""A real browser that is told what to do, by chromedriver: for what needs keys, time or a loss."""

import json
import shutil
import subprocess
import urllib.request
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
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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

    def close(self) -> None:
        """It ends with its driver."""
        try:
            self._told("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait(20.0)

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
