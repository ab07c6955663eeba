"""A trained joint encoder: candidate lists of any length -> logits, in blocks of one shape."""

import functools
import hashlib
import json

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import load_file

from xe_retrieval import config as config_lib
from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.data import paths
from xe_retrieval.reranking import settings, step, token_tables
from xe_retrieval.towers import joint
from xe_retrieval.training import checkpoint_reader

PAIRS = 512  # read at once; few enough to stay in the caches of a CPU
IMAGES = 64  # compressed at once
WEIGHTS = "joint.safetensors"  # of an exported re-ranker


class Scorer:
  """`compress` images, then `logits` of lists of them."""

  def __init__(self, config, params, step=None, fingerprint=""):
    self.config, self.step, self.fingerprint = config, step, fingerprint
    self.params, self._variables = params, {"params": params}
    model = joint.from_config(config)
    self._compress = jax.jit(lambda v, x: model.apply(v, x, method="image_tokens"))
    self._logits = jax.jit(functools.partial(model.apply, method="logits"))

  @property
  def image_shape(self) -> tuple[int, int]:
    """(tokens, width) that are stored of an image, as float16."""
    joint_ = self.config.joint
    return joint_.compressed or self.config.tokens.places, joint_.width

  @property
  def bytes_per_image(self) -> int:
    return int(np.prod(self.image_shape)) * 2

  def compress(self, batches):
    """Batches of a tower's tokens [n, places, width] -> yields float16 [n, tokens, width]."""
    for batch in batches:
      for start in range(0, len(batch), IMAGES):
        part = batch[start : start + IMAGES]
        padded = np.pad(part, [(0, IMAGES - len(part)), (0, 0), (0, 0)])
        yield np.asarray(self._compress(self._variables, padded)).astype(np.float16)[: len(part)]

  def logits(self, tokens: token_tables.Tokens, images, rows, first):
    """Texts [Q], compressed images [M, tokens, width], int [Q, K], the first stage's scores
    [Q, K] -> float32 [Q, K].
    """
    out = np.empty(rows.shape, np.float32)
    for block in blocks(tokens.lengths, rows.shape[1]):
      out[block.at] = self.block(tokens, images, rows, first, block)
    return out

  def block(self, tokens, images, rows, first, block):
    """The logits of one of `blocks`, [q, k]."""
    size, count, length = block.shape
    asked = rows[block.at]
    q, k = asked.shape
    text, known = (
      np.pad(x, [(0, size - q)] + [(0, 0)] * (x.ndim - 1))
      for x in tokens.padded(block.at[0][:, 0], length)
    )
    shown = np.zeros((size, count, *images.shape[1:]), np.float16)
    shown[:q, :k] = images[asked.reshape(-1)].reshape(q, k, *images.shape[1:])
    shown = shown.reshape(-1, *images.shape[1:])
    places = np.arange(len(shown), dtype=np.int32).reshape(size, count)
    scores = np.zeros(places.shape, np.float32)
    scores[:q, :k] = self.config.scale * first[block.at]
    return np.asarray(self._logits(self._variables, text, known, shown, places, scores))[:q, :k]


class Block:
  """Which queries and columns are read at once, padded to a shape (queries, columns, tokens)."""

  def __init__(self, queries, columns, size, count, length):
    self.at = queries[:, None], columns[None, :]
    self.shape = size, count, length


def blocks(lengths, columns: int) -> list[Block]:
  """Lists [Q, columns] in blocks of at most PAIRS pairs, captions of about one length in each."""
  pieces = -(-columns // PAIRS)
  count = -(-columns // pieces)
  size = max(PAIRS // count, 1)
  padded = -(-lengths // token_tables.MULTIPLE) * token_tables.MULTIPLE
  out = []
  for length in np.unique(padded):
    queries = np.flatnonzero(padded == length)
    fits = min(size, 1 << (len(queries) - 1).bit_length())  # a single query is not padded to many
    for start in range(0, len(queries), fits):
      for piece in range(0, columns, count):
        chosen = np.arange(piece, min(piece + count, columns))
        out.append(Block(queries[start : start + fits], chosen, fits, count, int(length)))
  return out


def restore(workdir, which="best") -> Scorer:
  """The re-ranker of a workdir at its best (on validation) or latest checkpoint, or exported."""
  workdir = paths.given(workdir)
  if (workdir / WEIGHTS).exists():
    config, params = _read_exported(workdir)
    return Scorer(config, params, None, fingerprint(config, params))
  if not (workdir / "config.json").exists():
    raise ValueError(f"{workdir} is no workdir of a training run: it has no config.json")
  config = config_lib.from_json((workdir / "config.json").read_text())
  if not settings.is_reranker(config):
    raise ValueError(
      f"{workdir} holds no re-ranker but a dual encoder; configs/flickr8k_rerank.py trains one"
    )
  like = jax.eval_shape(lambda: step.variables(config, joint.from_config(config)))
  mesh = mesh_lib.make()
  at, variables, _ = checkpoint_reader.read_model(workdir, which, like, mesh_lib.replicated(mesh))
  params = jax.device_get(variables["params"]["joint"])
  return Scorer(config, params, at, fingerprint(config, params))


def _read_exported(path):
  """-> config and parameters of what export_format.write wrote."""
  try:
    tensors = load_file(path / WEIGHTS)
  except (OSError, SafetensorError) as e:
    raise ValueError(f"{path / WEIGHTS} cannot be read: {e}") from e
  config = config_lib.from_json((path / "config.json").read_text())
  return config, traverse_util.unflatten_dict(tensors, sep=".")


def require_towers(scorer, towers: token_tables.Towers, name) -> None:
  """ValueError, if the re-ranker was trained on the tokens of other towers."""
  if scorer.config.tokens.towers != towers.fingerprint():
    raise ValueError(
      f"the re-ranker {name} reads the tokens of other towers than those of this model; it was "
      f"trained behind {scorer.config.first_stage}"
    )


def fingerprint(config, params) -> str:
  """A hash of the weights, and of the towers whose tokens they read."""
  about = config.tokens.to_dict() | config.joint.to_dict() | {"scale": config.scale}
  digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
  return digest.hexdigest()
