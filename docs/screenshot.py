"""Take the screenshot of ``dashboard.md`` in Chromium: ``python docs/screenshot.py ADDRESS`` while the dashboard runs.

The dashboard shows the two runs whose commands are on that page.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parent / "images" / "dashboard-charts.png"
PATIENCE_S = 60  # for what takes one or two
SCALE = 2  # pixels of the picture per pixel of the page
MARGIN = 10  # pixels of the page around what is shown
# TensorBoard's elements have shadow roots, which neither a selector nor innerText enters.
FUNCTIONS = """
const inside = node => [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes];
const all = node => [node, ...inside(node).flatMap(all)];
const matching = (selector, part) => all(part).filter(node => node.matches && node.matches(selector));
const texts = node => node.nodeType === 3 ? [node.data]
  : ['STYLE', 'SCRIPT'].includes(node.tagName) ? [] : inside(node).flatMap(texts);
const text = node => texts(node).join(' ').replace(/\\s+/g, ' ');
const wait = ms => new Promise(done => setTimeout(done, ms));
const until = async look => {
  for (;;) {
    const found = look();
    if (found) return found;
    await wait(100);
  }
};
"""
ALL_TEXT = """until(() => {
  const found = text(document);
  return WORDS.every(word => found.includes(word)) && found;
})"""
UNSMOOTHED = "&_smoothingWeight=0"
PAGE = f"#custom_scalars{UNSMOOTHED}"
# The boxes of the loss charts, once the list of curves is open below each and everything is drawn.
CHARTS = """(async () => {
  const cards = await until(() => {
    const found = matching('tf-custom-scalar-multi-line-chart-card', document).slice(0, 2);
    return found.length === 2 && found.every(card => text(card).includes('Matches (4)')) && found;
  });
  matching('paper-checkbox', document).find(box => text(box).includes('Ignore outliers')).click();
  for (const card of cards) matching('.toggle-matches-button', card)[0].click();
  const lists = cards.flatMap(card => matching('iron-collapse', card));
  await until(() => lists.length > 1 && lists.every(list => list.classList.contains('iron-collapse-opened')));
  await wait(2000);  // for the curves in the new scale
  return cards.map(card => card.getBoundingClientRect().toJSON());
})()"""


class Browser:
    """A Chromium without a window, controlled over two pipes in the DevTools protocol.

    Args:
        executable: Of :func:`find_chromium`.
        folder: For its files.
    """

    def __init__(self, executable: str, folder: Path) -> None:
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        self._from, self._to, self._number, self._rest = read_here, write_here, 0, b""
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1000", "--remote-debugging-pipe"]
        # its side of the pipes are descriptors 3 and 4
        plumbing = f'exec 3<&{read_there} 4>&{write_there}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", plumbing, "-", executable, *words, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(read_there, write_there),
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)

    def open(self, address: str) -> str:
        """Open a page; returns its session, which :meth:`call` takes."""
        target = self.call("Target.createTarget", url=address)["targetId"]
        return str(self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol, or its error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._to, json.dumps({**message, "sessionId": session} if session else message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        result: dict[str, Any] = answer.get("result", answer)
        return result

    def evaluate(self, session: str, code: str) -> Any:
        """The value of an expression on a page, which may be a promise; it can call FUNCTIONS."""
        # a block, because the names may be there already
        options = {"expression": f"{{{FUNCTIONS}{code}}}", "awaitPromise": True, "returnByValue": True}
        while "error" in (answer := self.call("Runtime.evaluate", session, **options)):
            if "context" not in answer["error"]["message"]:  # a new one comes with the page
                raise RuntimeError(answer["error"]["message"])
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"]["value"]

    def page_text(self, address: str, words: Sequence[str]) -> str:
        """All text of a page, once each of the words is on it."""
        return str(self.evaluate(self.open(address), ALL_TEXT.replace("WORDS", json.dumps(words))))

    def screenshot(self, session: str, boxes: Sequence[dict[str, float]]) -> bytes:
        """A PNG of the smallest part of a page that contains some boxes, in pixels from its upper left corner."""
        left, top = (min(box[side] for box in boxes) for side in ("left", "top"))
        right, bottom = (max(box[side] for box in boxes) for side in ("right", "bottom"))
        size = {"width": right - left + 2 * MARGIN, "height": bottom - top + 2 * MARGIN}
        clip = {"x": left - MARGIN, "y": top - MARGIN, **size, "scale": SCALE}
        answer = self.call("Page.captureScreenshot", session, clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._from)
        os.close(self._to)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], PATIENCE_S)[0]:
                raise TimeoutError("the browser does not answer")
            self._rest += os.read(self._from, 2**16)
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def find_chromium() -> str:
    """The path of a Chromium.

    Raises:
        FileNotFoundError: There is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError("there is no Chromium here (Debian: apt-get install chromium)")


def take(address: str, path: Path = PICTURE) -> None:
    """Take the screenshot.

    Args:
        address: Of the dashboard, with a slash at the end.
        path: Where it is written.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(find_chromium(), Path(profile))
        try:
            session = browser.open(address + PAGE)
            path.write_bytes(browser.screenshot(session, browser.evaluate(session, CHARTS)))
        finally:
            browser.close()


if __name__ == "__main__":
    take(sys.argv[1])
