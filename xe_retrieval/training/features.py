"""A cache of the features of frozen towers, so that each is run once per split.

A table is a .npy file under <data.dir>/features, named by a hash of everything that it depends on:
the tower's weights and settings, the records of the split, the tokenizer or image decoder. Runs
with other seeds and losses share it. An interrupted computation resumes where it stopped.
"""

import hashlib
import json
import sys

import jax
import numpy as np
from etils import epath
from tqdm import tqdm

from xe_retrieval.data import decoding, lock, pipeline
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import processes

BATCH = 64
SAVE = 8  # batches between saves


def cacheable(config) -> set[str]:
  """The towers that are frozen and see no augmentation: a subset of {"text", "image"}."""
  model = dual_encoder.from_config(config)
  whole = {
    name
    for name, tower in (("text", model.text.tower), ("image", model.image.tower))
    if tower.frozen == len(tower.parts())
  }
  return whole if config.data.augment == "none" else whole - {"image"}


def tables(
  config, model, variables, tokenizer, source, towers=("image", "text")
) -> dict[str, np.ndarray]:
  """The cached features of a split, memory-mapped: `image` by record, `text` by caption."""
  out = {}
  for tower in sorted(cacheable(config) & set(towers)):
    key = _key(config, variables, tokenizer, source, tower)
    path = _directory(config) / f"{source.split}-{tower}-{key}.npy"
    with processes.primary_first(path.name):
      if not path.exists():
        with lock.creating(path):  # against other runs on this machine
          if not path.exists():
            _compute(path, config, model, variables, tokenizer, source, tower)
    out[tower] = np.load(path, mmap_mode="r", allow_pickle=False)
  return out


def of(encoder, source, towers=("image", "text")) -> dict[str, np.ndarray]:
  """`tables` for a trained model."""
  model = dual_encoder.from_config(encoder.config)
  return tables(encoder.config, model, encoder.variables, encoder.tokenizer, source, towers)


def batches(source, tokenizer, config, tables, start=0, process=0, processes=1):
  """The pairs of `pipeline.train_batches`, with features in place of a cached tower's input."""
  if not tables:
    yield from pipeline.train_batches(source, tokenizer, config, start, process, processes)
    return
  columns = source.columns("image_id", "text_ids")
  counts = np.array([len(ids) for ids in columns["text_ids"]])  # captions of each record
  first = np.cumsum(counts) - counts
  image_ids = pipeline.int32(np.asarray(columns["image_id"]))
  text_ids = pipeline.int32(np.concatenate(columns["text_ids"]))
  choose = pipeline.choice(len(source), config, process, processes)
  if "text" in tables:
    text_name, text = "text_features", tables["text"]
  else:
    text_name, text = "tokens", tokenizer(_captions(source))
  if "image" not in tables:
    decoded = pipeline.train_batches(source, tokenizer, config, start, process, processes)
  for step in range(start, config.steps):
    records, draws = choose(step)
    captions = first[records] + draws % counts[records]
    batch = {
      text_name: text[captions],
      "image_id": image_ids[records],
      "text_id": text_ids[captions],
    }
    if "image" in tables:
      yield batch | {"image_features": tables["image"][records]}
    else:
      yield batch | {"image": next(decoded)["image"]}


def _compute(path, config, model, variables, tokenizer, source, tower):
  """Writes float32 [records or captions, width]; resumes after an interruption."""
  run = jax.jit(lambda v, x: model.apply(v, x, method=f"{tower}_features"))
  part, finished = path.with_suffix(".part"), path.with_suffix(".batches")
  done = int(finished.read_text() or 0) if finished.exists() and part.exists() else 0
  if tower == "text":
    captions = _captions(source)
    inputs, count, width = _by_length(tokenizer(captions), done), len(captions), config.text.width
  else:
    inputs = _numbered(pipeline.image_batches(source, config.image.size, BATCH, done), done)
    count, width = len(source), config.image.widths[-1]
  table = np.lib.format.open_memmap(part, "r+" if done else "w+", np.float32, (count, width))
  with tqdm(
    total=count,
    initial=done * BATCH,
    desc=f"{tower} features of {source.split}",
    file=sys.stdout,
    delay=2,
  ) as bar:
    for n, (rows, batch) in enumerate(inputs, done):
      padded = np.pad(batch, [(0, BATCH - len(batch))] + [(0, 0)] * (batch.ndim - 1))
      table[rows] = np.asarray(run(variables, padded))[: len(batch)]
      if n % SAVE == SAVE - 1:
        table.flush()
        finished.write_text(str(n + 1))
      bar.update(len(batch))
  table.flush()
  part.rename(path)  # atomic: a file with this name is complete
  finished.unlink(missing_ok=True)


def _numbered(batches, start):
  """Yields (row numbers, images) for each batch; the first is batch number `start`."""
  done = start * BATCH
  for batch in batches:
    yield slice(done, done + len(batch)), batch
    done += len(batch)


def _by_length(tokens, start):  # int32 [n, T]
  """Yields (row numbers, tokens [≤ BATCH, t]), sorted by length to minimise padding."""
  lengths = np.count_nonzero(tokens, axis=1)
  order = np.argsort(lengths, kind="stable")
  for first in range(start * BATCH, len(tokens), BATCH):
    rows = order[first : first + BATCH]
    longest = min(-(-lengths[rows].max() // 8) * 8, tokens.shape[1])
    yield rows, tokens[rows, :longest]


def _captions(source):
  return [caption for captions in source.captions() for caption in captions]


# Fields of a tower that its features do not depend on: the path of the weights (they are hashed
# themselves), the head, and the optimiser.
_IRRELEVANT = ("pretrained", "freeze", "dropout", "batch_norm", "feature_dropout", "trunk")
_IRRELEVANT += ("learning_rate", "end_learning_rate", "warmup_steps", "weight_decay", "optimizer")


def _key(config, variables, tokenizer, source, tower):
  digest = hashlib.sha256()
  settings = {k: v for k, v in config[tower].to_dict().items() if k not in _IRRELEVANT}
  settings["dtype"] = config.dtype
  digest.update(json.dumps([settings, source.fingerprint()], sort_keys=True).encode())
  digest.update(tokenizer.fingerprint().encode() if tower == "text" else bytes([decoding.DECODER]))
  for collection in ("params", "batch_stats"):
    tree = variables.get(collection, {}).get(tower, {}).get("tower", {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
  return digest.hexdigest()[:20]


def _directory(config):
  out = epath.Path(config.data.dir or "~/tensorflow_datasets").expanduser() / "features"
  out.mkdir(parents=True, exist_ok=True)
  return out
