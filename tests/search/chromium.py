"""Chromium without a window, driven by its own protocol: as much as the browser test needs."""

import base64
import contextlib
import json
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.request

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
  *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
  *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
  *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0"),
)


def find() -> str | None:
  return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
  """One tab."""

  def __init__(self, socket):
    self._socket, self._number, self.errors = socket, 0, []
    self.send("Runtime.enable")
    self.send("Page.enable")
    self.send("Log.enable")

  def send(self, method, **params):
    self._number += 1
    self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
    while True:
      message = json.loads(self._socket.recv(timeout=60))
      if message.get("method") == "Runtime.exceptionThrown":
        self.errors.append(message["params"]["exceptionDetails"])
      if (
        message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error"
      ):
        self.errors.append(message["params"]["entry"])
      if message.get("id") == self._number:
        if "error" in message:
          raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

  def open(self, address):
    self.send("Page.navigate", url=address)

  def value(self, script):
    """What a JavaScript expression gives."""
    found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
    if "exceptionDetails" in found:
      raise RuntimeError(f"{script}: {found['exceptionDetails']}")
    return found["result"].get("value")

  def wait(self, script, seconds=30):
    """Until the expression is true."""
    end = time.monotonic() + seconds
    while True:
      with contextlib.suppress(RuntimeError):  # the page may be on its way
        if self.value(script):
          return
      if time.monotonic() > end:
        raise AssertionError(f"not within {seconds} s: {script}; errors: {self.errors}")
      time.sleep(0.03)

  def type(self, text):
    self.send("Input.insertText", text=text)

  def press(self, key, code):
    """A key by its name and its number."""
    for kind in ("rawKeyDown", "keyUp"):
      numbers = {"windowsVirtualKeyCode": code, "nativeVirtualKeyCode": code}
      self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **numbers)
    if key == "Enter":
      self.send("Input.dispatchKeyEvent", type="char", text="\r")

  def click(self, script):
    """The middle of an element."""
    box = self.value(
      f"(() => {{ const e = {script}; e.scrollIntoView({{block: 'center'}}); "
      "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
      where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
      self.send("Input.dispatchMouseEvent", type=kind, **where)

  def look(self, width, height, dark=False):
    """The size of the window, and the colours that the user prefers."""
    self.send(
      "Emulation.setDeviceMetricsOverride",
      width=width,
      height=height,
      deviceScaleFactor=1,
      mobile=width < 600,
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self.send("Emulation.setEmulatedMedia", features=[scheme])

  def screenshot(self, path):
    shot = self.send("Page.captureScreenshot", format="png")
    pathlib.Path(path).write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def page(program):
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
    command = [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
      file, end = pathlib.Path(profile) / "DevToolsActivePort", time.monotonic() + 60
      while not (file.exists() and file.read_text().strip()):
        if process.poll() is not None or time.monotonic() > end:
          raise RuntimeError(f"{program} did not start")
        time.sleep(0.05)
      port = file.read_text().split()[0]
      with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
      with connect(tabs[0]["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
        yield Page(socket)
    finally:
      process.terminate()
      process.wait()
