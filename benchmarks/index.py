"""Our index beside NumPy brute force and faiss, on the same vectors, by speed at equal recall.

  python -m benchmarks.index [--vectors=200000] [--kinds=surface,clusters,noise]
  python -m benchmarks.index --images=vectors/ --workdir=runs/mine --captions=captions/coco:train

Each index is tuned on one half of the queries to look no further than it takes to find 97 % of the
true ten nearest, and measured on the other half, in nine interleaved rounds: "× NumPy" compares the
best rounds, "median" is over the ratios within a round. Data: `surface`, 24 directions and some
noise, like embeddings; `clusters`, 2,000 of them; `noise`, which has nothing to make use of. With
--images, vectors that `embed` made, and captions of a data set as queries.

  python -m benchmarks.index --only=disk --vectors=1000000,10000000 --precision=float16

writes a collection of `surface` vectors on disk as `index` does, in chunks, and prints how long
that takes, its memory and size, the recall and speed of searching, and the time of adding 10,000.
With --only=milvus, the same vectors go to files and, with an exact index and with HNSW, to
Milvus-lite.
"""

import argparse
import time

import numpy as np

import xe_retrieval
from benchmarks import index_in_milvus, index_on_disk
from xe_retrieval.embed import embedded_source, vector_files
from xe_retrieval.search import image_sources
from xe_retrieval.search.stores import nearest, scann_index

WIDTH, K, TARGET = 128, 10, 0.97


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--only", choices=["speed", "disk", "milvus"], default="speed")
  parser.add_argument("--vectors", default="200000", help="how many; several: 1000000,10000000")
  parser.add_argument("--precision", choices=["float32", "float16"], default="float32")
  parser.add_argument("--kind", choices=["auto", "exact", "scann"], default="scann", help="disk")
  parser.add_argument("--folder", help="where the collection is written; by default in TMPDIR")
  parser.add_argument("--queries", type=int, default=4_000)
  parser.add_argument("--kinds", default="surface,clusters,noise")
  parser.add_argument("--images", help="a directory that embed wrote")
  parser.add_argument("--workdir", help="of the model that embedded them")
  parser.add_argument("--captions", help="DATASET:SPLIT")
  parser.add_argument("--data_dir", default="datasets")
  args = parser.parse_args()
  for count in map(int, args.vectors.split(",")):
    if args.only == "milvus":
      index_on_disk.measure(count, args.precision, args.kind, args.folder)
      for kind in ("exact", "hnsw"):
        index_in_milvus.measure(count, kind, args.folder)
      continue
    if args.only == "disk":
      index_on_disk.measure(count, args.precision, args.kind, args.folder)
      continue
    if args.images:
      compare("photos", *embedded(args))
      return
    for kind in args.kinds.split(","):
      compare(kind, *draw(kind, count, args.queries))


def compare(kind, vectors, queries):
  sample, queries = queries[::2], queries[1::2]
  truth, sample_truth = (nearest.nearest(vectors, q, K)[0] for q in (queries, sample))
  print(
    f"{kind}: {len(vectors):,} × {vectors.shape[1]}, ten nearest of {len(queries):,} queries",
    flush=True,
  )
  print(f"  {'':22}{'build':>9}{'queries/s':>12}{'× NumPy':>9}{'median':>9}{'recall@10':>11}")
  ways = {"NumPy": (0.0, lambda: brute_force(vectors, queries))}
  ways["ScaNN (ours)"] = ours(vectors, sample, queries)
  ways |= faiss_ways(vectors, sample, sample_truth, queries)
  seconds, found = {name: [] for name in ways}, {}
  for _ in range(9):
    for name, (_, search) in ways.items():
      start = time.perf_counter()
      found[name] = search()
      seconds[name].append(time.perf_counter() - start)
  for name, (build, _) in ways.items():
    speed = len(queries) / min(seconds[name])
    best = min(seconds["NumPy"]) / min(seconds[name])
    paired = np.median(np.divide(seconds["NumPy"], seconds[name]))
    recall = scann_index.overlap(found[name], truth)
    row = f"{build:7.1f} s{speed:12,.0f}{best:9.1f}{paired:9.1f}{recall:11.4f}"
    print(f"  {name:22}{row}", flush=True)


def ours(vectors, sample, queries):
  start = time.perf_counter()
  index = scann_index.build(vectors, queries=sample)
  return time.perf_counter() - start, lambda: index.search(queries, K)[0]


def faiss_ways(vectors, sample, truth, queries):
  """{name: (seconds to build, search)}; without faiss nothing."""
  try:
    import faiss
  except ImportError:
    print("  (faiss is not installed: pip install faiss-cpu)")
    return {}
  leaves = 4 * round(np.sqrt(len(vectors)))
  width, product = vectors.shape[1], faiss.METRIC_INNER_PRODUCT
  flat = faiss.IndexFlatIP(width)
  ivf = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, leaves, product)
  hnsw = faiss.IndexHNSWFlat(width, 32, product)
  out = {}
  for name, index in (("faiss Flat", flat), ("faiss IVF", ivf), ("faiss HNSW", hnsw)):
    start = time.perf_counter()
    index.train(vectors)
    index.add(vectors)
    build = time.perf_counter() - start
    if index is ivf:
      name += _tune(index, "nprobe", sample, truth, leaves)
    if index is hnsw:
      name += _tune(index.hnsw, "efSearch", sample, truth, 4096, index)
    out[name] = (build, lambda index=index: index.search(queries, K)[1])
  return out


def _tune(settings, field, sample, truth, most, index=None):
  """Sets the field to the smallest value that reaches the target on the sample."""
  value = 10
  while value < most:
    setattr(settings, field, value)
    if scann_index.overlap((index or settings).search(sample, K)[1], truth) >= TARGET:
      break
    value = int(value * 1.25) + 1
  return f" {field}={value}"


def brute_force(vectors, queries):
  found = []
  for i in range(0, len(queries), 100):
    scores = queries[i : i + 100] @ vectors.T
    found.append(np.argpartition(scores, -K, axis=1)[:, -K:])
  return np.concatenate(found)


def draw(kind, count, queries):
  random = np.random.default_rng(0)
  total = count + queries
  x = random.standard_normal((total, WIDTH), np.float32)
  if kind == "surface":
    directions = random.standard_normal((24, WIDTH), np.float32)
    x = 0.3 * x + random.standard_normal((total, 24), np.float32) @ directions
  elif kind == "clusters":
    centres = random.standard_normal((2_000, WIDTH), np.float32)
    x = 0.7 * x + centres[random.integers(0, 2_000, total)]
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  return x[:count], x[count:]


def embedded(args):
  """Vectors of pictures, and of captions as queries, both as search compares them."""
  model = xe_retrieval.load(args.workdir)
  directory = embedded_source.open_directory(args.images, model.fingerprint())
  vectors = np.concatenate([vector_files.vectors(table) for table in directory.tables()])
  captions = list(image_sources.named(args.captions, args.data_dir).captions())
  some = np.random.default_rng(0).permutation(len(captions))[: args.queries]
  found = model.embed_queries([captions[i] for i in some], progress=True)
  return vectors, model.scoring.text(*found)


if __name__ == "__main__":
  main()
