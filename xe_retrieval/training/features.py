"""Features of frozen towers, computed once: a tower that does not learn need not be run again.

A table is a .npy file under <data.dir>/features, named by a hash of everything that it depends on:
the tower's weights and settings, the records of the split, and how pictures and captions are made
into input. Change any of them and it is another file; later runs, seeds and losses find the same.
"""

import hashlib
import json
import os
import sys

import jax
import numpy as np
from etils import epath
from tqdm import tqdm

from xe_retrieval.data import pipeline

BATCH = 64


def cacheable(config) -> set[str]:
  """Which towers see the same input every time and never change: a subset of {"text", "image"}."""
  out = {"text"} if config.text.freeze == "all" else set()
  return out | (
    {"image"} if config.image.freeze == "all" and config.data.augment == "none" else set()
  )


def tables(config, model, variables, tokenizer, source) -> dict[str, np.ndarray]:
  """The cached features of a split, memory-mapped: `image` by record, `text` by caption."""
  out = {}
  for tower in sorted(cacheable(config)):
    path = (
      _directory(config)
      / f"{source.split}-{tower}-{_key(config, variables, tokenizer, source, tower)}.npy"
    )
    if not path.exists():
      _write(path, _compute(config, model, variables, tokenizer, source, tower))
    out[tower] = np.load(path, mmap_mode="r", allow_pickle=False)
  return out


def batches(source, tokenizer, config, tables, start=0, process=0, processes=1):
  """The very pairs of `pipeline.train_batches`, with features where there are tables."""
  if not tables:
    yield from pipeline.train_batches(source, tokenizer, config, start, process, processes)
    return
  columns = source.columns("image_id", "text_ids")
  counts = np.array([len(ids) for ids in columns["text_ids"]])  # captions of each record
  first = np.cumsum(counts) - counts
  image_ids = pipeline.int32(np.asarray(columns["image_id"]))
  text_ids = pipeline.int32(np.concatenate(columns["text_ids"]))
  choose = pipeline.choice(len(source), config, process, processes)
  text = tables["text"] if "text" in tables else tokenizer(_captions(source))
  if "image" not in tables:
    pictures = pipeline.train_batches(source, tokenizer, config, start, process, processes)
  for step in range(start, config.steps):
    records, draws = choose(step)
    captions = first[records] + draws % counts[records]
    yield {
      "image": tables["image"][records] if "image" in tables else next(pictures)["image"],
      "tokens": text[captions],
      "image_id": image_ids[records],
      "text_id": text_ids[captions],
    }


def _compute(config, model, variables, tokenizer, source, tower):
  """float32 [records or captions, width]."""
  if tower == "text":
    tokens = tokenizer(_captions(source))
    inputs = (tokens[i : i + BATCH] for i in range(0, len(tokens), BATCH))
    count, method = len(tokens), "text_features"
  else:
    inputs = pipeline.image_batches(source, config.image.size, BATCH)
    count, method = len(source), "image_features"
  run = jax.jit(lambda v, x: model.apply(v, x, method=method))
  out = []
  with tqdm(
    total=count, desc=f"{tower} features of {source.split}", file=sys.stdout, delay=2
  ) as bar:
    for batch in inputs:
      padded = np.pad(batch, [(0, BATCH - len(batch))] + [(0, 0)] * (batch.ndim - 1))
      out.append(np.asarray(run(variables, padded))[: len(batch)])
      bar.update(len(batch))
  return np.concatenate(out)


def _captions(source):
  return [caption for captions in source.captions() for caption in captions]


def _key(config, variables, tokenizer, source, tower):
  digest = hashlib.sha256()
  settings = dict(config[tower].to_dict(), dtype=config.dtype)
  for learning in (
    "learning_rate",
    "end_learning_rate",
    "warmup_steps",
    "weight_decay",
    "optimizer",
  ):
    settings.pop(learning)
  digest.update(json.dumps([settings, source.fingerprint()], sort_keys=True).encode())
  if tower == "text":
    digest.update(tokenizer.fingerprint().encode())
  for collection in ("params", "batch_stats"):
    tree = variables.get(collection, {}).get(tower, {}).get("tower", {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
  return digest.hexdigest()[:20]


def _directory(config):
  out = epath.Path(config.data.dir or "~/tensorflow_datasets").expanduser() / "features"
  out.mkdir(parents=True, exist_ok=True)
  return out


def _write(path, table):
  """All or nothing: a table under its own name is complete."""
  unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  with unfinished.open("wb") as f:
    np.save(f, table)
  unfinished.rename(path)
