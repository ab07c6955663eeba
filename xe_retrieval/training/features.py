"""A cache of the features of frozen towers, so that each is run once per split.

A table is a .npy file under <data.dir>/features, named by a hash of everything that it depends on:
the tower's weights and settings, the records of the split, the tokenizer or image decoder. Runs
with other seeds and losses share it. All processes compute it together; finished shards lie beside
it until it is complete, so that an interrupted computation resumes where it stopped.
"""

import contextlib
import functools
import hashlib
import json
import re
import shutil

import jax
import numpy as np

from xe_retrieval.data import decoding, lock, paths, pipeline
from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.towers import dual_encoder, families
from xe_retrieval.towers.families import side_by_side
from xe_retrieval.training import processes

BATCH = 64
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
  config, variables, tokenizer, source, towers=("image", "text"), views=None
) -> dict[str, np.ndarray]:
  """The cached features of a split, memory-mapped: `image` by record, `text` by caption.

  With `views` = 2, by default config.data.views, the train split also has `mirrored`: the features
  of its mirrored photos, by record. Of several towers side by side, each is cached as if it was
  the only one.
  """
  out, cached = {}, cacheable(config)
  views = views or _views(config, cached)
  wanted = sorted(cached & set(towers))
  fingerprint = source.fingerprint() if wanted else ""
  for encoder in wanted:
    found = []
    for i, (alone, place) in enumerate(side_by_side.each(config, encoder)):
      own = side_by_side.take(variables, encoder, place)
      own = {collection: {encoder: {"tower": tree}} for collection, tree in own.items()}
      words = tokenizer.each[i] if encoder == "text" else None
      found.append(_of_tower(alone, own, words, source, fingerprint, encoder, views))
    out |= {
      name: found[0][name] if len(found) == 1 else Joined([one[name] for one in found])
      for name in found[0]
    }
  return out


def _of_tower(config, variables, tokenizer, source, fingerprint, tower, views):
  """`tables` of a single tower, "text" or "image"."""
  key = key_of(config, variables, tokenizer, fingerprint, tower)
  compute = functools.partial(_compute, config, variables, tokenizer, source, tower)
  stem = directory(config) / f"{source.split}-{tower}-{key}"
  out = {tower: cached(stem.with_suffix(".npy"), compute)}
  if tower == "image" and views == 2 and source.split == "train":
    mirrored = stem.with_name(f"{stem.name}-mirrored.npy")
    out["mirrored"] = cached(mirrored, functools.partial(compute, mirrored=True))
  return out


class Joined:
  """Tables of several towers as one, [n, sum of widths]; only rows that are asked for are read."""

  def __init__(self, tables):
    self._tables = tables

  def __len__(self):
    return len(self._tables[0])

  def __getitem__(self, rows):
    return np.concatenate([np.asarray(table[rows]) for table in self._tables], axis=-1)


def standardised(config, variables, tables) -> dict:
  """Variables in which several towers side by side know mean and deviation of their features."""
  stats = dict(variables.get("batch_stats", {}))
  for encoder in ("text", "image"):
    if side_by_side.several(config, encoder):
      stats[encoder] = stats[encoder] | {"standard": _standard(tables[encoder])}
  return variables | {"batch_stats": stats} if stats else variables


def _standard(table):  # [n, width] -> {"mean": float32 [width], "std": float32 [width]}
  total = squares = 0.0
  for start in range(0, len(table), AT_ONCE):
    part = table[start : start + AT_ONCE].astype(np.float64)
    total, squares = total + part.sum(0), squares + (part**2).sum(0)
  mean = total / len(table)
  std = np.sqrt(np.maximum(squares / len(table) - mean**2, 0))
  std = np.where(std > 1e-6 * (1 + np.abs(mean)), std, 1)  # a feature that never changes
  return {"mean": mean.astype(np.float32), "std": std.astype(np.float32)}


def of(encoder, source, towers=("image", "text")) -> dict[str, np.ndarray]:
  """`tables` for a trained model, which never sees mirrored photos."""
  return tables(encoder.config, encoder.variables, encoder.tokenizer, source, towers, 1)


def batches(source, tokenizer, config, tables, start=0, process=0, processes=1):
  """The pairs of `pipeline.train_batches`, with features in place of a cached tower's input."""
  if not tables:
    yield from pipeline.train_batches(source, tokenizer, config, start, process, processes)
    return
  image_ids, text_ids = source.column("image_id"), source.column("text_ids")
  first, counts = text_ids.starts, text_ids.counts  # of the captions of each record
  captions = source.captions().flat
  choose = pipeline.choice(len(source), config, process, processes)
  if "image" not in tables:
    decoded = pipeline.train_batches(source, tokenizer, config, start, process, processes)
  for step in range(start, config.steps):
    records, draws = choose(step)
    rows = first[records] + draws % counts[records]  # of the captions
    words = [captions[i] for i in rows] if "text" not in tables or "mirrored" in tables else []
    batch = {
      "image_id": pipeline.int32(image_ids[records]),
      "text_id": pipeline.int32(text_ids.flat[rows]),
    }
    if "text" in tables:
      batch["text_features"] = tables["text"][rows]
    else:
      batch["tokens"] = tokenizer(words)
    if "image" in tables:
      image = np.asarray(tables["image"][records])
      if "mirrored" in tables:
        mirror = _mirror(draws) & ~np.array(
          [_SIDED.search(caption) is not None for caption in words]
        )
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


def cached(path, compute):
  """The table at `path`, memory-mapped; computed first if there is none."""
  if _anyone_lacks(path):
    with lock.creating(path) if processes.is_primary() else contextlib.nullcontext():
      if _anyone_lacks(path):  # else another run on this machine has made it meanwhile
        compute(path)
  return np.load(path, mmap_mode="r", allow_pickle=False)


def _anyone_lacks(path):
  """The same answer in all processes, which may have one disk or each its own."""
  return "" in processes.exchange("features", "here" if path.exists() else "")


def _compute(config, variables, tokenizer, source, tower, path, mirrored=False):
  """Writes float32 [records or captions, width]; all processes and their devices share the work."""
  model = dual_encoder.from_config(config)
  run, size = runner(model, variables, f"{tower}_features")
  if tower == "text":
    tokens, lengths = token_ids(source, tokenizer)
    batches = by_length(lengths, size)
    read = functools.partial(map, functools.partial(cut, tokens, lengths))
  else:
    batches = pipeline.spans(len(source), size)
    read = functools.partial(pipeline.image_batches, source, decoding.View.of(config.image))

  def compute(batches):
    for batch in read(batches):
      yield run(batch[:, :, ::-1] if mirrored else batch)

  name = f"{tower} features of {source.split}" + " mirrored" * mirrored
  write(path, batches, compute, dual_encoder.feature_widths(config)[tower], np.float32, name)


def runner(model, variables, method):
  """A function from at most `size` inputs to a method's outputs on all devices, and that size."""
  mesh = mesh_lib.make(jax.local_devices())
  rows, everywhere = mesh_lib.rows(mesh), mesh_lib.replicated(mesh)
  compiled = jax.jit(
    lambda v, x: model.apply(v, x, method=method),
    in_shardings=(everywhere, rows),
    out_shardings=rows,
  )
  variables, size = jax.device_put(variables, everywhere), -(-BATCH // mesh.size) * mesh.size

  def run(batch):
    padded = np.pad(batch, [(0, size - len(batch))] + [(0, 0)] * (batch.ndim - 1))
    # Put there by hand: where there are several processes, jit does not divide NumPy's arrays.
    return np.asarray(compiled(variables, jax.device_put(padded, rows)))[: len(batch)]

  return run, size


def write(path, batches, compute, width, dtype, name):
  """Writes the table [rows of all batches, width] of `processes.shared_rows`, resumably."""
  parts = path.with_suffix(".shards")
  shards = processes.shared_rows(batches, compute, parts, name, dtype)
  with processes.primary_first(path.name):
    if not path.exists():  # else one disk for all, and process 0 has written it
      part, count = path.with_suffix(f".part{jax.process_index()}"), sum(map(len, shards))
      table = np.lib.format.open_memmap(part, "w+", dtype, (count, width))
      processes.assemble(batches, shards, table).flush()
      part.rename(path)  # atomic: a file with this name is complete
  processes.exchange("assembled", "")  # until then, others may read them
  shutil.rmtree(parts, ignore_errors=True)


def token_ids(source, tokenizer):  # -> int32 [captions, T], int [captions]
  captions = source.captions().flat
  parts = [tokenizer(captions[i : i + 65_536]) for i in range(0, len(captions), 65_536)]
  tokens = np.concatenate(parts)
  return tokens, tokenizer.lengths(tokens)


def by_length(lengths, size):
  """Rows of each batch, [≤ size], sorted by length to minimise padding."""
  order = np.argsort(lengths, kind="stable")
  return [order[i : i + size] for i in range(0, len(order), size)]


def cut(tokens, lengths, rows):
  """The tokens of these rows, [n, t], without columns in which all are padding but for a few."""
  return tokens[rows, : min(-(-lengths[rows].max() // 8) * 8, tokens.shape[1])]


def key_of(config, variables, tokenizer, fingerprint, tower):
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
