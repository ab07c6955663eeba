"""Exact metrics beside what one would use instead; each line ends with the ratio.

  python -m benchmarks.evaluation [precision ranks embedding]

Times are the best of interleaved repetitions, memory is the peak of a process of its own, less what
it holds when the embeddings are loaded.
"""

import multiprocessing
import pathlib
import re
import sys
import time

import numpy as np

WIDTH = 128


def precision(size=4096, repeats=3):
  """PR-AUC over size² pairs: streaming against the whole matrix and scikit-learn."""
  runs = {"ours": [], "scikit-learn": []}
  for _ in range(repeats):
    for name, found in runs.items():
      found.append(_alone(_average_precision, name, size))
  best = {name: min(f[0] for f in found) for name, found in runs.items()}
  memory = {name: min(f[1] for f in found) for name, found in runs.items()}
  values = [found[0][2] for found in runs.values()]
  print(f"PR-AUC over {size**2 / 1e6:.1f}M pairs, difference {abs(values[0] - values[1]):.1e}")
  for name in runs:
    print(f"  {name:14} {best[name]:7.3f} s {memory[name]:8.1f} MiB")
  ratio = best["scikit-learn"] / best["ours"], memory["scikit-learn"] / memory["ours"]
  print(f"  {ratio[0]:.1f} × faster, {ratio[1]:.1f} × less memory")
  seconds, mib, _ = _alone(_average_precision, "ours", 12_559)
  print(f"PR-AUC over {12_559**2 / 1e6:.0f}M pairs: {seconds:.2f} s, {mib:.1f} MiB")


def ranks(images=1_000_000, queries=2048, repeats=2):
  """Exact ranks among a million images against matrix product + argpartition."""
  from xe_retrieval.evaluation import ranks

  image, text = _unit(images, 0), _unit(queries, 1)
  own = np.arange(queries)
  scores = np.empty((256, images), np.float32)
  blocks = range(0, queries, 256)

  def product(i):
    return np.matmul(text[i : i + 256], image.T, out=scores)

  def tiled():  # into memory that stays in cache: the fastest bare product
    tile = np.empty((512, 16384), np.float32)
    for j in range(0, images, 16384):
      for i in range(0, queries, 512):
        n = len(image[j : j + 16384])
        np.matmul(
          text[i : i + 512], image[j : j + 16384].T, out=tile.ravel()[: 512 * n].reshape(512, n)
        )

  ways = {
    "ours": lambda: ranks.text_to_image(text, image[:queries], own, image[queries:]),
    "matrix product": tiled,
    "… + argpartition": lambda: [
      np.argpartition(product(i), -100, axis=1)[:, -100:].copy() for i in blocks
    ],
  }
  best = _interleaved(ways, repeats)
  print(f"Ranks of {queries:,} queries among {images:,} images")
  for name, seconds in best.items():
    print(f"  {name:18} {seconds:7.2f} s")
  ours, bare, top = best.values()
  print(
    f"  {top / ours:.1f} × faster than a top-100, {bare / ours:.2f} of the bare product's speed"
  )
  full, mib = _alone(_exact_ranks, 12_559, images)
  print(
    f"  12,559 queries: {full:.1f} s in {mib:.0f} MiB besides the embeddings; "
    f"among 3.3M images that makes {3.3 * full:.0f} s"
  )


def embedding(repeats=3):
  """Pictures from disk through the evaluation against the bare jitted tower on one batch."""
  from configs import cc, quickstart

  paper = cc.get_config()
  paper.image.pretrained = paper.text.pretrained = ""  # random weights are as fast
  paper.text.update(layers=1, width=16, heads=1, mlp=16)
  _embedding("ResNet-50 at 224", paper, images=128, batch=32, repeats=repeats)
  _embedding("the quickstart's tower", quickstart.get_config(), 2048, 256, repeats)


def _embedding(title, config, images, batch, repeats):
  import tempfile

  import jax

  from xe_retrieval import model as models
  from xe_retrieval.data import pipeline
  from xe_retrieval.towers import dual_encoder

  with tempfile.TemporaryDirectory() as directory:
    source = pipeline.Source(f"shapes/{images}", directory, "train")
    model = dual_encoder.from_config(config)
    variables = dual_encoder.init(config, model)
    encoder = models.Encoder(config, model, variables, None, batch=batch)
    pixels = np.zeros((batch, config.image.size, config.image.size, 3), np.uint8)
    tower = jax.jit(lambda v, x: model.apply(v, x, method="embed_image"))
    ways = {
      "evaluation": lambda: encoder.embed_source(source),
      "bare tower": lambda: [
        tower(variables, pixels).block_until_ready() for _ in range(images // batch)
      ],
    }
    for way in ways.values():
      way()  # compiles
    best = _interleaved(ways, repeats)
  print(f"Embedding {images:,} pictures, {title}")
  for name, seconds in best.items():
    print(f"  {name:14} {images / seconds:8.1f} images/s")
  print(f"  {best['bare tower'] / best['evaluation']:.2f} of the bare tower's speed")


def _average_precision(name, size):
  """Seconds, MiB over the embeddings, and the area; in a process of its own."""
  from sklearn import metrics

  from xe_retrieval.evaluation import precision_recall

  text, image, own = _unit(size, 1), _unit(size, 0), np.arange(size)
  text = text + image
  text[:256] @ image[:256].T  # starts the threads of BLAS
  before, start = _peak(reset=True), time.perf_counter()
  if name == "ours":
    area = precision_recall.curve(text, image, own).average_precision
  else:
    truth = np.zeros((size, size), bool)
    truth[own, own] = True
    area = metrics.average_precision_score(truth.ravel(), (text @ image.T).ravel())
  return time.perf_counter() - start, _peak() - before, area


def _exact_ranks(queries, images):
  """Seconds and MiB over the embeddings; in a process of its own."""
  from xe_retrieval.evaluation import ranks

  text, image, own = _unit(queries, 2), _unit(images, 0), np.arange(queries)
  ranks.text_to_image(text[:512], image[:512], own[:512])  # imports, starts the threads of BLAS
  before, start = _peak(reset=True), time.perf_counter()
  ranks.text_to_image(text, image[:queries], own, image[queries:])
  return time.perf_counter() - start, _peak() - before


def _alone(function, *arguments):
  with multiprocessing.get_context("spawn").Pool(1) as pool:
    return pool.apply(function, arguments)


def _interleaved(ways, repeats):
  best = dict.fromkeys(ways, np.inf)
  for _ in range(repeats):
    for name, way in ways.items():
      start = time.perf_counter()
      way()
      best[name] = min(best[name], time.perf_counter() - start)
  return best


def _unit(count, seed):
  x = np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  return x


def _peak(reset=False):
  """MiB that this process has held at most, since it was last reset."""
  if reset:
    pathlib.Path("/proc/self/clear_refs").write_text("5")
  status = pathlib.Path("/proc/self/status").read_text()
  return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


if __name__ == "__main__":
  for name in sys.argv[1:] or ("precision", "ranks", "embedding"):
    {"precision": precision, "ranks": ranks, "embedding": embedding}[name]()
