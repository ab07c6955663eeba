"""A cache of the features of frozen towers, so that each is run once per split.

A table is a .npy file under <data.dir>/features, named by a hash of everything that it depends on:
the tower's weights and settings, the records of the split, the tokenizer or image decoder. Runs
with other seeds and losses share it. An interrupted computation resumes where it stopped.
"""

import functools
import hashlib
import json
import re
import sys

import jax
import numpy as np
from tqdm import tqdm

from xe_retrieval.data import decoding, lock, paths, pipeline
from xe_retrieval.towers import dual_encoder, families
from xe_retrieval.towers.families import side_by_side
from xe_retrieval.training import processes

BATCH = 64
SAVE = 8  # batches between saves
AT_ONCE = 4_096  # rows of a table in memory


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
  config, model, variables, tokenizer, source, towers=("image", "text"), views=None
) -> dict[str, np.ndarray]:
  """The cached features of a split, memory-mapped: `image` by record, `text` by caption.

  With `views` = 2, by default config.data.views, the train split also has `mirrored`: the features
  of its mirrored photos, by record.
  """
  out, cached = {}, cacheable(config)
  views = views or _views(config, cached)
  if side_by_side.several(config) and "image" in cached & set(towers):
    out = _side_by_side(config, variables, tokenizer, source, views)
    towers = set(towers) - {"image"}
  wanted = sorted(cached & set(towers))
  fingerprint = source.fingerprint() if wanted else ""  # reads the whole split
  for tower in wanted:
    key = _key(config, variables, tokenizer, fingerprint, tower)
    compute = functools.partial(_compute, config, model, variables, tokenizer, source, tower)
    stem = directory(config) / f"{source.split}-{tower}-{key}"
    out[tower] = _cached(stem.with_suffix(".npy"), compute)
    if tower == "image" and views == 2 and source.split == "train":
      out["mirrored"] = _cached(
        stem.with_name(f"{stem.name}-mirrored.npy"), functools.partial(compute, mirrored=True)
      )
  return out


def _side_by_side(config, variables, tokenizer, source, views):
  """The image tables of several towers, each cached as if it was the only one."""
  found = []
  for alone, place in side_by_side.each(config):
    own = side_by_side.take(variables, "image", place)
    own = {collection: {"image": {"tower": tree}} for collection, tree in own.items()}
    model = dual_encoder.from_config(alone)
    found.append(tables(alone, model, own, tokenizer, source, ("image",), views))
  return {name: Joined([of_tower[name] for of_tower in found]) for name in found[0]}


class Joined:
  """Tables of several towers as one, [n, sum of widths]; only rows that are asked for are read."""

  def __init__(self, tables):
    self._tables = tables

  def __len__(self):
    return len(self._tables[0])

  def __getitem__(self, rows):
    return np.concatenate([np.asarray(table[rows]) for table in self._tables], axis=-1)


def standardised(config, variables, table) -> dict:
  """Variables in which several towers side by side know mean and deviation of their features."""
  if not side_by_side.several(config):
    return variables
  total = squares = 0.0
  for start in range(0, len(table), AT_ONCE):
    part = table[start : start + AT_ONCE].astype(np.float64)
    total, squares = total + part.sum(0), squares + (part**2).sum(0)
  mean = total / len(table)
  std = np.sqrt(np.maximum(squares / len(table) - mean**2, 0))
  std = np.where(std > 1e-6 * (1 + np.abs(mean)), std, 1)  # a feature that never changes
  standard = {"mean": mean.astype(np.float32), "std": std.astype(np.float32)}
  stats = variables["batch_stats"]
  image = stats["image"] | {"standard": standard}
  return variables | {"batch_stats": stats | {"image": image}}


def of(encoder, source, towers=("image", "text")) -> dict[str, np.ndarray]:
  """`tables` for a trained model, which never sees mirrored photos."""
  model = dual_encoder.from_config(encoder.config)
  return tables(encoder.config, model, encoder.variables, encoder.tokenizer, source, towers, 1)


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
  if "mirrored" in tables:
    sided = np.array([_SIDED.search(caption) is not None for caption in _captions(source)])
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
      image = np.asarray(tables["image"][records])
      if "mirrored" in tables:
        mirror = _mirror(draws) & ~sided[captions]
        image[mirror] = tables["mirrored"][records[mirror]]
      yield batch | {"image_features": image}
    else:
      yield batch | {"image": next(decoded)["image"]}


_SIDED = re.compile(r"\b(left|right)", re.IGNORECASE)  # also leftmost, right-hand, …


def _mirror(draws):
  """Whether each record shows its mirrored photo: the highest bit of its 63-bit draw.

  The caption is chosen by draw % captions, which hardly depends on that bit.
  """
  return (draws >> 62).astype(bool)


def _views(config, cached):
  views = config.data.get("views", 1)  # runs of older versions have none
  if views not in (1, 2):
    raise ValueError(f"config.data.views={views} should be 1 or 2 (the photo and its mirror image)")
  if views == 2 and "image" not in cached:
    raise ValueError(
      "config.data.views=2 needs a frozen image tower whose features are cached: "
      "config.image.freeze='all' and config.data.augment='none'"
    )
  return views


def _cached(path, compute):
  """The table at `path`, memory-mapped; computed first if there is none."""
  with processes.primary_first(path.name):
    if not path.exists():
      with lock.creating(path):  # against other runs on this machine
        if not path.exists():
          compute(path)
  return np.load(path, mmap_mode="r", allow_pickle=False)


def _compute(config, model, variables, tokenizer, source, tower, path, mirrored=False):
  """Writes float32 [records or captions, width]; resumes after an interruption."""
  run = jax.jit(lambda v, x: model.apply(v, x, method=f"{tower}_features"))
  part, finished = path.with_suffix(".part"), path.with_suffix(".batches")
  done = int(finished.read_text() or 0) if finished.exists() and part.exists() else 0
  if tower == "text":
    captions = _captions(source)
    ids = tokenizer(captions)
    inputs, count = _by_length(ids, tokenizer.lengths(ids), done), len(captions)
  else:
    images = pipeline.image_batches(source, decoding.View.of(config.image), BATCH, done)
    inputs = _numbered((batch[:, :, ::-1] if mirrored else batch for batch in images), done)
    count = len(source)
  width = dual_encoder.feature_widths(config)[tower]
  table = np.lib.format.open_memmap(part, "r+" if done else "w+", np.float32, (count, width))
  with tqdm(
    total=count,
    initial=done * BATCH,
    desc=f"{tower} features of {source.split}{' mirrored' * mirrored}",
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


def _by_length(tokens, lengths, start):  # int32 [n, T], int [n]
  """Yields (row numbers, tokens [≤ BATCH, t]), sorted by length to minimise padding."""
  order = np.argsort(lengths, kind="stable")
  for first in range(start * BATCH, len(tokens), BATCH):
    rows = order[first : first + BATCH]
    longest = min(-(-lengths[rows].max() // 8) * 8, tokens.shape[1])
    yield rows, tokens[rows, :longest]


def _captions(source):
  return [caption for captions in source.captions() for caption in captions]


def _key(config, variables, tokenizer, fingerprint, tower):
  digest = hashlib.sha256()
  settings = families.settings(config, tower) | {"dtype": config.dtype}
  digest.update(json.dumps([settings, fingerprint], sort_keys=True).encode())
  digest.update(tokenizer.fingerprint().encode() if tower == "text" else bytes([decoding.DECODER]))
  for collection in ("params", "batch_stats"):
    tree = variables.get(collection, {}).get(tower, {}).get("tower", {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
  return digest.hexdigest()[:20]


def directory(config):
  """Where tables of all data sets under data.dir lie; made if it is not there."""
  out = paths.local(config.data.dir or "~/tensorflow_datasets", "config.data.dir") / "features"
  out.mkdir(parents=True, exist_ok=True)
  return out
