"""The server for a long time: python -m benchmarks.serve --soak [--minutes=30]

Sixteen clients search, page, export, upload pictures and load thumbnails without pause; 5 % of the
requests are hostile; every 20 seconds the index is replaced. No good request may fail, and after
the first fifth of the time the server's memory may not move by more than 5 %.
"""

import collections
import http.client
import io
import json
import pathlib
import random
import threading
import time
import urllib.parse

import numpy as np
from PIL import Image

import xe_retrieval
from xe_retrieval.data import shapes
from xe_retrieval.search import image_sources, update

CLIENTS, REPLACED, HOSTILE, FLAT = 16, 20, 0.05, 0.05
IMAGES = 500
BAD = (  # method, path, headers, body
  ("GET", "/api/search?q=" + "x" * 600, {}, None),
  ("GET", "/api/search?q=a&threshold=nan", {}, None),
  ("GET", "/image/..%2f..%2fetc%2fpasswd", {}, None),
  ("GET", "/api/search?q=a&folder=../..", {}, None),
  ("GET", "/api/about", {"host": "evil.example"}, None),
  ("GET", "/api/about", {"x-long": "x" * 40_000}, None),
  ("POST", "/api/search", {"content-type": "application/json"}, b"[" * 5_000),
  ("POST", "/api/search", {"content-type": "image/png"}, b"\x89PNG\r\n\x1a\n" + b"\0" * 1_000),
  ("POST", "/api/search", {"content-type": "image/jpeg"}, b"\xff\xd8\xff" * 3_000),
  ("DELETE", "/api/search", {}, None),
)


def run(server, workdir, folder, minutes):
  """Returns whether all went well; prints what happened."""
  model = xe_retrieval.load(workdir)
  photos, index = pathlib.Path(folder) / "photos", pathlib.Path(folder) / "index"
  photos.mkdir()
  for i in range(IMAGES):
    draw(photos, i)
  source = image_sources.Folder(photos)
  update.update_index(index, model, workdir, [source])
  with server(index) as port:
    state = State(port)
    clients = [threading.Thread(target=client, args=(state, i)) for i in range(CLIENTS)]
    for thread in clients:
      thread.start()
    start, replaced, memory = time.monotonic(), 0, []
    while (past := time.monotonic() - start) < 60 * minutes:
      memory.append((past, server.memory(port)))
      if past >= REPLACED * (replaced + 1):
        (photos / f"{replaced:06d}.png").unlink()
        draw(photos, IMAGES + replaced)
        update.update_index(index, model, workdir, [source])
        replaced += 1
      time.sleep(1)
    state.stop.set()
    for thread in clients:
      thread.join()
  return report(state, replaced, np.array(memory), minutes)


class State:
  def __init__(self, port):
    self.port, self.stop = port, threading.Event()
    self.seconds = collections.defaultdict(list)  # kind -> [seconds]
    self.failed = []


def draw(folder, number):
  Image.fromarray(shapes.render(shapes.scene(0, "test", number))).save(folder / f"{number:06d}.png")


def client(state, number):
  draws, ids = random.Random(number), []
  connection = http.client.HTTPConnection("127.0.0.1", state.port, timeout=60)
  at = 0
  while not state.stop.is_set():
    at += 1
    kind, (method, path, headers, body), fine = choose(draws, ids, at)
    start = time.perf_counter()
    try:
      connection.request(method, path, body, headers)
      answer = connection.getresponse()
      content = answer.read()
    except (OSError, http.client.HTTPException) as e:
      connection.close()
      if kind != "hostile":
        state.failed.append((kind, path, repr(e)))
      continue
    state.seconds[kind].append(time.perf_counter() - start)
    if answer.status not in fine:
      state.failed.append((kind, path, answer.status, content[:200]))
    if kind == "search" and answer.status == 200:
      ids = [hit["id"] for hit in json.loads(content)["results"]] or ids


def choose(draws, ids, at):
  """(kind, request, statuses that are right)."""
  if draws.random() < HOSTILE:
    return "hostile", draws.choice(BAD), range(400, 500)
  what = draws.random()
  query = f"{shapes.caption(0, 'train', draws.randrange(5_000))} {draws.randrange(50)}"
  if ids and what < 0.3:
    return "thumbnail", ("GET", f"/image/{draws.choice(ids)}", {}, None), (200, 404)
  if ids and what < 0.35:
    return "similar", ("GET", f"/api/similar/{draws.choice(ids)}", {}, None), (200, 404)
  if what < 0.45:
    file = io.BytesIO()
    scene = shapes.render(shapes.scene(1, "test", draws.randrange(10**6)))
    Image.fromarray(scene).resize((512, 512)).save(file, "JPEG")
    body = file.getvalue()
    return "upload", ("POST", "/api/search?top=10", {"content-type": "image/jpeg"}, body), (200,)
  options = {"q": query, "threshold": -1, "top": 20}
  if what < 0.5:
    options |= {"order": "date", "offset": draws.randrange(0, 400)}
  elif what < 0.6:
    options |= {"levels": "true"}
  elif what < 0.62:
    words = urllib.parse.urlencode({"q": query, "threshold": -1, "format": "csv"})
    return "export", ("GET", f"/api/export?{words}", {}, None), (200,)
  return "search", ("GET", f"/api/search?{urllib.parse.urlencode(options)}", {}, None), (200,)


def report(state, replaced, memory, minutes):
  print(f"{minutes:g} minutes, {CLIENTS} clients, the index replaced {replaced} times")
  print(f"{'':12}{'requests':>10}{'median':>12}{'p99':>12}{'slowest':>12}")
  for kind, seconds in sorted(state.seconds.items()):
    median, p99, most = 1e3 * np.percentile(seconds, (50, 99, 100))
    print(f"{kind:12}{len(seconds):10,}{median:9.1f} ms{p99:9.1f} ms{most:9.1f} ms")
  settled = memory[memory[:, 0] > 60 * minutes / 5, 1]
  middle = np.median(settled)
  moved = np.abs(settled - middle).max() / middle
  first, last = (np.median(part) for part in np.array_split(settled, 4)[::3])
  print(
    f"memory in the second and the last fifth of the time: {first:,.0f}, {last:,.0f} MB (medians)"
  )
  print(f"memory after the first fifth: {settled.min():,.0f} to {settled.max():,.0f} MB", end="")
  print(f", ± {100 * moved:.1f} % of the median; {100 * FLAT:.0f} % allowed")
  print(f"failed good requests: {len(state.failed)}")
  for failure in state.failed[:10]:
    print("  ", *failure)
  return not state.failed and moved <= FLAT
