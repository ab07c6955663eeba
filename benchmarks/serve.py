"""The server under load at 100,000 images, beside the bare text tower.

  python -m benchmarks.serve [--workdir=runs/quickstart/cross_example_softmax] [--images=100000]
  python -m benchmarks.serve --clip_retrieval=PYTHON   # also benchmarks/clip_retrieval_back.py
  python -m benchmarks.serve --soak [--minutes=30]     # for a long time: benchmarks/soak.py

The text tower is that of the workdir; the image vectors are random, which does not change the
time. No query repeats, so the query cache never hits. Clients and server share this machine's
cores and talk over 127.0.0.1.
"""

import argparse
import itertools
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import numpy as np

import xe_retrieval
from benchmarks import clip_retrieval_back, soak
from xe_retrieval.calibration import artifact
from xe_retrieval.data import shapes
from xe_retrieval.search import chunks, image_sources, update

TARGET_MS, TARGET_SPEED, CLIENTS = 50, 250, 16


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--workdir", default="runs/quickstart/cross_example_softmax")
  parser.add_argument("--images", type=int, default=100_000)
  parser.add_argument("--kind", default="auto", choices=["auto", "exact", "scann"])
  parser.add_argument("--queries", type=int, default=2_000)
  parser.add_argument("--clip_retrieval", help="Python of an environment that has clip-retrieval.")
  parser.add_argument("--soak", action="store_true")
  parser.add_argument("--minutes", type=float, default=30, help="Of --soak.")
  args = parser.parse_args()
  if args.soak:
    with tempfile.TemporaryDirectory() as folder:
      sys.exit(0 if soak.run(Server, args.workdir, folder, args.minutes) else 1)
  model = xe_retrieval.load(args.workdir)
  known = artifact.read(args.workdir, model.fingerprint())
  how = "with" if known else "without"
  print(
    f"answers {how} probabilities; scores {'' if model.scoring.correction else 'not '}corrected"
  )
  bare = bare_tower(model, queries(args.queries // 4, 0))
  with tempfile.TemporaryDirectory() as folder:
    index = pathlib.Path(folder) / "index"
    start = time.perf_counter()
    make(index, model, args.workdir, args.images, args.kind)
    print(f"{args.images:,} images; index written in {time.perf_counter() - start:.1f} s")
    other = () if not args.clip_retrieval else beside(args, model, pathlib.Path(folder))
    del model
    with Server(index) as port:
      load(port, queries(200, 1), 1)  # warm
      one = load(port, queries(args.queries // 4, 2), 1)
      many = load(port, queries(args.queries, 3), CLIENTS)
      print_table(bare, one, many, *other)
      print(f"memory of the server: {Server.memory(port):,.0f} MB resident")


def print_table(bare, one, many, other_one=None, other_many=None):
  print(f"{'':28}{'median':>10}{'p95':>10}{'queries/s':>12}")
  rows = {"bare text tower, sequential": bare, "server, 1 client": one}
  rows[f"server, {CLIENTS} clients"] = many
  if other_one:
    rows |= {"clip-retrieval, 1 client": other_one, f"…, {CLIENTS} clients": other_many}
  for name, (seconds, speed) in rows.items():
    median, p95 = 1e3 * np.percentile(seconds, (50, 95))
    print(f"{name:28}{median:7.2f} ms{p95:7.2f} ms{speed:12,.0f}")
  p95 = 1e3 * np.percentile(one[0], 95)
  slower = np.median(one[0]) / np.median(bare[0])
  print(f"one client: p95 {p95:.1f} ms of {TARGET_MS} allowed; {slower:.1f} × the bare text tower")
  p95 = 1e3 * np.percentile(many[0], 95)
  print(
    f"{CLIENTS} clients: p95 {p95:.1f} ms; {many[1]:.0f} queries/s, {TARGET_SPEED} wanted;", end=""
  )
  print(f" {many[1] / bare[1]:.2f} × the bare text tower, sequential")


def beside(args, model, folder):
  """(one client, many clients) of clip-retrieval's back end on the vectors of `make`."""
  vectors = [x for _, x in random_vectors(args.images, model.config.embedding_dim)]
  np.save(folder / "vectors.npy", np.concatenate(vectors))
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  asked = [
    [clip_retrieval_back.request(v, 20) for v in model.embed_text(queries(count, seed))]
    for count, seed in ((200, 1), (args.queries // 4, 2), (args.queries, 3))
  ]
  with clip_retrieval_back.Server(args.clip_retrieval, folder, port):
    send(port, asked[0], 1)  # warm
    return send(port, asked[1], 1), send(port, asked[2], CLIENTS)


def queries(count, seed):
  """Captions, made unique by a number."""
  return [f"{shapes.caption(seed, 'test', i)} {seed} {i}" for i in range(count)]


def bare_tower(model, texts):
  model.embed_text(texts[:1])
  seconds = []
  for text in texts:
    start = time.perf_counter()
    model.embed_text([text])
    seconds.append(time.perf_counter() - start)
  return seconds, len(texts) / sum(seconds)


class _WithoutFiles(image_sources.Folder):
  """File names without files; their vectors are already in the partial index."""

  def __init__(self, folder, count):
    super().__init__(folder)
    self._count = count

  def count(self):
    return self._count

  def entries(self):
    return (image_sources.Entry(f"{i:08d}.jpg", (1, 1)) for i in range(self._count))


def make(path, model, workdir, count, kind):
  source = _WithoutFiles(path.parent, count)
  path.mkdir()
  embedded = update.partial(path, source.key, model.fingerprint()[:16])
  entries = source.entries()
  for _, x in random_vectors(count, model.config.embedding_dim):
    some = list(itertools.islice(entries, len(x)))
    names, ids = [e.name.encode() for e in some], chunks.ids_of(source, some)
    chunk = chunks.Chunk(ids, names, model.scoring.image(x), np.ones((len(x), 2), np.int64))
    chunks.Chunks([]).add(embedded, chunk)
  update.update_index(path, model, workdir, [source], kind=kind)


def random_vectors(count, width):
  """(first row, unit vectors [≤ 100,000, width]), of which 24 directions are long."""
  random = np.random.default_rng(0)
  directions = random.standard_normal((24, width), np.float32)
  for start in range(0, count, 100_000):
    size = min(100_000, count - start)
    x = 0.3 * random.standard_normal((size, width), np.float32)
    x += random.standard_normal((size, 24), np.float32) @ directions
    yield start, x / np.linalg.norm(x, axis=1, keepdims=True)


class Server:
  """python -m xe_retrieval.serve as a subprocess."""

  def __init__(self, index):
    self.command = [sys.executable, "-m", "xe_retrieval.serve", f"--index={index}", "--port=0"]

  def __enter__(self):
    self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
    lines = (re.search(r"http://127.0.0.1:(\d+)", line) for line in self.process.stdout)
    found = next(filter(None, lines), None)
    if not found:
      raise SystemExit("the server did not start")
    self.port = int(found[1])
    _servers[self.port] = self.process.pid
    return self.port

  @staticmethod
  def memory(port):
    """Resident, in MB."""
    status = pathlib.Path(f"/proc/{_servers[port]}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

  def __exit__(self, *_):
    self.process.terminate()
    self.process.wait()


_servers = {}


def load(port, texts, clients):
  options = {"threshold": -1, "top": 20}
  words = [urllib.parse.urlencode({"q": text} | options) for text in texts]
  asked = [f"GET /api/search?{w} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for w in words]
  return send(port, asked, clients)


def send(port, requests, clients):
  """Each client sends its share in sequence -> ([seconds], requests per second)."""
  seconds = []

  def client(share):
    connection = None
    for request in share:
      start = time.perf_counter()
      connection = connection or socket.create_connection(("127.0.0.1", port))
      connection.sendall(request)
      if not read(connection):
        connection.close()
        connection = None
      seconds.append(time.perf_counter() - start)

  threads = [threading.Thread(target=client, args=(requests[i::clients],)) for i in range(clients)]
  start = time.perf_counter()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if len(seconds) != len(requests):
    raise SystemExit(f"{len(requests) - len(seconds)} requests failed")
  return seconds, len(requests) / (time.perf_counter() - start)


def read(connection):
  """Reads an answer -> whether the connection is kept; clip-retrieval's takes one request."""
  head, _, body = receive(connection, b"", lambda data: b"\r\n\r\n" in data).partition(b"\r\n\r\n")
  if not re.match(rb"HTTP/1.\d 200", head):
    raise SystemExit(f"answered {head[:60]}")
  length = int(re.search(rb"(?i)content-length: *(\d+)", head)[1])
  receive(connection, body, lambda data: len(data) >= length)
  return b"connection: close" not in head.lower()


def receive(connection, data, is_whole):
  while not is_whole(data):
    more = connection.recv(65_536)
    if not more:
      raise SystemExit("the connection was closed in the middle of an answer")
    data += more
  return data


if __name__ == "__main__":
  main()
