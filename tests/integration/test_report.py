"""The page of a run in a real browser, and beside a run that goes on."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.report import write_report
from paceline.config import dump_config
from paceline.control.run_folder import RunFolder
from paceline.profiling.page import pages_in, read_page
from tests.toy import Toy, train

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

WIDEST = """(() => {
  const cut = [];
  const inScroll = (each) => each.closest(".scroll, .code");
  for (const each of document.querySelectorAll("main *")) {
    const box = each.getBoundingClientRect();
    const isOut = box.right > innerWidth + 1 || box.left < -1;
    if (box.width && isOut && !inScroll(each)) cut.push(each.outerHTML.slice(0, 120));
  }
  return JSON.stringify([document.documentElement.scrollWidth, innerWidth, cut.slice(0, 5)]);
})()"""
"""How wide the page is, the window, and what stands out of it."""


CONTRAST = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
      .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (each) => {
    const colour = getComputedStyle(each).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && each.parentElement ? behind(each.parentElement) : colour;
  };
  let lowest = [99, ""];
  for (const each of document.querySelectorAll("main *:not(title)")) {
    if (!Array.from(each.childNodes).some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(each);
    const [a, b] = [light(each.namespaceURI.endsWith("svg") ? style.fill : style.color), light(behind(each))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < lowest[0]) lowest = [contrast, each.outerHTML.slice(0, 120)];
  }
  return JSON.stringify(lowest);
})()"""
"""The lowest contrast of any text with what is behind it, as WCAG 2 counts it, and of which element."""

SLOW_TRAINING = """
import time
from paceline.models.target import Target
features = Target.features
def slow(self, *arguments, **named):
    time.sleep(0.05)
    return features(self, *arguments, **named)
Target.features = slow
from paceline.cli.main import main
main()
"""


WITH_PIPE = """
import os, sys
for number, descriptor in ((103, sys.argv[1]), (104, sys.argv[2]), (3, 103), (4, 104)):
    os.dup2(int(descriptor), number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts a program whose descriptors 3 and 4 are two given ones."""


class Browser:
    """A tab of a headless Chromium, spoken to over its debugging pipe: JSON messages that end in a zero byte."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, its_write = os.pipe()
        its_read, to_write = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe".split()
        command = [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", WITH_PIPE, str(its_read), str(its_write), *command],
            pass_fds=(its_read, its_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_read)
        os.close(its_write)
        self._in, self._out, self._number, self._rest = to_read, to_write, 0, b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        head, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(head)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(message["params"]))
        return message

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def show(self, url: str, width: int, is_dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        until(lambda: self.evaluate("document.readyState") == "complete" and self.evaluate("location.href") == url)

    def picture(self, place: Path, height: int | None = None) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        place.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)


def until(condition: Callable[[], object]) -> None:
    """Wait for something to come true; patience decides nothing but a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


@contextlib.contextmanager
def process(*arguments: object, out: Path, program: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command of its own, its output in a file."""
    start = ["-m", "paceline"] if program is None else ["-c", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with open(out, "wb") as file:
        started = subprocess.Popen(
            [sys.executable, *start, *map(str, arguments)], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.wait()


def address_in(out: Path) -> str:
    until(lambda: b"http://" in out.read_bytes() and out.read_bytes().endswith(b"\n"))
    found = re.search(r"http://127\.0\.0\.1:\d+/", out.read_text())
    assert found, out.read_text()
    return found.group()


def end(started: subprocess.Popen[bytes]) -> float:
    """Ctrl-C, and the seconds that it took."""
    began = time.monotonic()
    started.send_signal(signal.SIGINT)
    assert started.wait(PATIENCE_S) == 0
    return time.monotonic() - began


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    opened = Browser(tmp_path / "browser")
    try:
        yield opened
    finally:
        opened.close()


@needs_chromium
def test_the_page_fits_phone_and_desk_light_and_dark(toy: Toy, tmp_path: Path, browser: Browser) -> None:
    """Nothing stands out of the window, all charts are drawn, text can be read, and the browser has no complaint."""
    report, lines = train(toy.config(tmp_path / "run", "topology.layout=split", "profiling.interval=0.2"))
    place = tmp_path / "page.html"
    write_report(RunFolder(tmp_path / "run"), place)
    seen = set()
    for width in (1280, 380):
        for is_dark in (False, True):
            browser.show(place.as_uri(), width, is_dark)
            page_width, window, cut = json.loads(browser.evaluate(WIDEST))
            assert page_width <= window and cut == []
            assert browser.evaluate("document.querySelectorAll('figure svg polyline').length") >= 6
            assert browser.evaluate("document.body.innerText").count("Nothing to draw") == 0
            lowest, where = json.loads(browser.evaluate(CONTRAST))
            assert lowest >= 4.5, where
            seen.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    assert browser.complaints == []
    shown = browser.evaluate("document.body.innerText")
    assert f"The last process finished at step {report.step}" in shown and f"{len(lines)}" in shown
    assert "model_forward" in shown and "Share of the time" in shown


@pytest.mark.slow
@needs_chromium
def test_a_page_follows_a_run_that_goes_on(toy: Toy, tmp_path: Path, browser: Browser) -> None:
    """Steps move without a reload; the run's counting stays off; Ctrl-C ends it at once, and the page says so."""
    run_dir = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_config(toy.config(run_dir, "data.epochs=10000", "topology.layout=split")))
    with process("train", tmp_path / "run.yaml", out=tmp_path / "training", program=SLOW_TRAINING) as training:
        until(lambda: (run_dir / "metrics.jsonl").exists() and len((run_dir / "metrics.jsonl").read_bytes()) > 2000)
        with process("report", run_dir, "--serve", out=tmp_path / "served") as served:
            browser.show(address_in(tmp_path / "served"), 380)
            state = "document.querySelector('.state').textContent"
            until(lambda: "Training: step " in browser.evaluate(state))
            first = browser.evaluate(state)
            browser.evaluate("window.mark = 7; document.querySelector('#about details').open = true")
            until(lambda: browser.evaluate(state) != first)
            until(
                lambda: browser.evaluate("document.getElementById('live').textContent").startswith("Live; last change ")
            )
            assert browser.evaluate("window.mark") == 7
            assert browser.evaluate("document.querySelector('#about details').open") is True
            page_width, window, cut = json.loads(browser.evaluate(WIDEST))
            assert page_width <= window and cut == []
            (page,) = pages_in(run_dir / "profile")
            assert not read_page(page).control.is_on
            assert end(served) < 5
        told = "document.getElementById('live').textContent"
        until(lambda: browser.evaluate(told).startswith("Not connected"))
        assert training.poll() is None and not (run_dir / "report.html").exists()
        assert not [each for each in browser.complaints if "ERR_" not in each]  # the server is gone: that is told


@pytest.mark.slow
def test_a_served_page_takes_up_what_is_written(tmp_path: Path) -> None:
    """Of a run that another process goes on with: its lines arrive, the part that they change alone."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("target: {path: T}\ndata: {path: D}\n")
    line = {"step": 1, "loss": 2.5, "tokens": 100, "seconds": 0.5, "acceptance_length_est": 1.5}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with process("report", run_dir, "--serve", out=tmp_path / "served") as served:
        address = address_in(tmp_path / "served")
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            page = answer.read().decode()
        version = re.search(r'data-version="([^"]+)"', page)
        assert version and "2.500" in page
        with urllib.request.urlopen(f"{address}events?since={version.group(1)}", timeout=PATIENCE_S) as stream:
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line | {"step": 2, "loss": 7.5}) + '\n{"step": 3, "lo')
            data = next(each for each in stream if each.startswith(b"data: "))
            parts = json.loads(data.removeprefix(b"data: "))
            assert "5.000" in parts["now"] and "events" not in parts
            assert end(served) < 5
    assert sorted(each.name for each in run_dir.iterdir()) == ["config.yaml", "metrics.jsonl"]
