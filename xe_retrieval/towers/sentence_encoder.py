"""A pretrained sentence encoder (BERT with mean pooling, e.g. MiniLM) by itself."""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from xe_retrieval.data import lock, tokenization
from xe_retrieval.towers import hugging_face, pretrained, weight_files
from xe_retrieval.towers.bert import Bert
from xe_retrieval.towers.dual_encoder import TextEncoder

BATCH = 128
TOKENS = 64  # longer captions are cut


def load(path: str, cache=None):
  """Directory or Hugging Face id -> a function from n strings to float32 [n, width], unit norm.

  With a directory `cache`, what it gives for a list of strings is kept there and read again.
  """
  directory = weight_files.locate(path)
  fields = pretrained.bert_fields(directory)
  model = TextEncoder(Bert(**fields), embedding_dim=1, pooling="mean")
  tokens = jnp.zeros((1, 8), jnp.int32)
  like = jax.eval_shape(lambda: model.init(jax.random.PRNGKey(0), tokens))
  tower = {"params": like["params"]["tower"]}
  tower = hugging_face.from_tensors(weight_files.read(directory), tower, path)
  variables = {"params": {"tower": tower["params"]}}
  tokenizer = tokenization.load(path, TOKENS)
  features = jax.jit(lambda v, x: model.apply(v, x, method="features"))

  def embed(captions):
    ids = tokenizer(list(captions))
    lengths = np.count_nonzero(ids, axis=1)
    order = np.argsort(lengths, kind="stable")  # short captions together: little padding
    out = np.zeros((len(ids), fields["width"]), np.float32)
    starts = range(0, len(ids), BATCH)
    for start in tqdm(starts, "sentences", file=sys.stdout, delay=2, leave=False):
      rows = order[start : start + BATCH]
      longest = min(-(-lengths[rows].max() // 8) * 8, TOKENS)
      batch = np.pad(ids[rows, :longest], ((0, BATCH - len(rows)), (0, 0)))
      out[rows] = np.asarray(features(variables, batch))[: len(rows)]
    return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)

  if cache is None:
    return embed
  weights = hashlib.sha256(tokenizer.fingerprint().encode())
  for leaf in jax.tree.leaves(variables):
    weights.update(np.asarray(leaf).tobytes())

  def remembered(captions):
    digest = weights.copy()
    digest.update("\0".join(captions).encode())
    file = cache / f"sentences-{digest.hexdigest()[:20]}.npy"
    if not file.exists():
      with lock.creating(file):
        if not file.exists():
          part = file.with_suffix(".part")
          with part.open("wb") as out:
            np.save(out, embed(captions), allow_pickle=False)
          part.rename(file)  # atomic: a file with this name is complete
    return np.load(file, allow_pickle=False)

  return remembered
