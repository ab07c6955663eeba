"""Image-text losses by name: dense (the equations) or streaming (the same in O(N·D) memory).

  loss = losses.get("cross_example_softmax", scale=20.0, implementation="streaming")
  value = loss(text, image, text_id=None, image_id=None)  # [N, D], [N, D], [N], [N] -> []
  value = loss(text, image, scale=scale)  # a scalar that is learned or scheduled

Embeddings are normalised inside. Rows that share a text_id or an image_id (numbers, or strings
outside of jit) are not each other's negatives. With `mesh`, the rows are sharded over `axis` and
the batch is the global one: value and gradients are those of a single device. Take the gradient of
`loss` itself, outside any shard_map of your own. A row with a NaN or an inf makes the loss NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xe_retrieval.losses import dense, pair_scores, streaming

IMPLEMENTATIONS = {"dense": dense, "streaming": streaming}


def get(
  name,
  scale=20.0,
  keep=0.5,
  implementation="dense",
  mesh=None,
  axis="data",
  *,
  bias=dense.SIGMOID_BIAS,
  softening=5.0,
  correction=0.5,
  corrected_share=1.0,
  tcm_weight=1.0,
  tcm_positive=0.9,
  tcm_negative=0.5,
):
  """loss(text [N, D], image [N, D], text_id=None [N], image_id=None [N], **live) -> [] float32.

  scale: logits are scale × cosine. keep: share of the negatives that mining keeps (snm and the
  losses named negative_mining), in (0, 1]. bias: see dense.sigmoid. softening: see
  pair_scores.positives. correction in [0, 1], corrected_share in (0, 1]: see dense.softmax. tcm_…:
  weight and cosines of dense.tcm.

  live: scale, bias or softening as an array, in place of the number given here; differentiable.
  """
  if name not in names():
    raise ValueError(f"loss {name!r} is unknown; it is one of: {', '.join(names())}")
  if not 0 < keep <= 1:
    raise ValueError(f"keep={keep} is the share of negatives that mining keeps: in (0, 1]")
  if not 0 <= correction <= 1:
    raise ValueError(f"correction={correction} should be in [0, 1]")
  if not 0 < corrected_share <= 1:
    raise ValueError(f"corrected_share={corrected_share} should be in (0, 1]")
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation={implementation!r} is one of: {', '.join(IMPLEMENTATIONS)}")
  if mesh is not None and axis not in mesh.axis_names:
    raise ValueError(f"axis={axis!r} is not an axis of the mesh, which has {mesh.axis_names}")
  corrected = dict(correction=correction, corrected_share=corrected_share)
  tcm = dict(weight=tcm_weight, positive_margin=tcm_positive, negative_margin=tcm_negative)
  function, settings = _table(keep, corrected, tcm)[name]
  function = getattr(IMPLEMENTATIONS[implementation], function)
  function = functools.partial(function, **settings)
  scalars = pair_scores.Live(scale, bias, softening)

  @jax.jit  # compiled once, also if the caller is outside of any jit
  def run(text, image, ids, live):
    text, image = pair_scores.normalize(text), pair_scores.normalize(image)
    if mesh is None:
      return function(text, image, ids, live)
    local = functools.partial(function, axis=axis)
    specs = (P(axis), P(axis), P(axis), P())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(text, image, ids, live)

  def loss(text, image, text_id=None, image_id=None, **live):
    if text.ndim != 2 or text.shape != image.shape:
      raise ValueError(f"text {text.shape} and image {image.shape} should both be [N, D]")
    ids = {"text_id": text_id, "image_id": image_id}
    ids = tuple(_ids(x, name, len(text)) for name, x in ids.items() if x is not None)
    ids = ids or (jnp.arange(len(text), dtype=jnp.int32),)  # a row is no negative of itself
    if mesh is not None and len(text) % mesh.shape[axis]:
      raise ValueError(
        f"{len(text)} rows do not divide over {mesh.shape[axis]} devices of {axis!r}"
      )
    live = jax.tree.map(jnp.float32, scalars._replace(**live))
    return run(*_sharded((text, image, ids), mesh, axis), live)

  return loss


def _ids(ids, name, n):  # -> [n]
  """Numbers strings and 64-bit ids from 0: JAX would silently cut them to 32 bits."""
  if not isinstance(ids, jax.Array):
    ids = np.asarray(ids)
    wide = ids.dtype.kind not in "biu" or ids.dtype.itemsize > 4
    ids = np.unique(ids, return_inverse=True)[1].astype(np.int32) if wide else ids
  if ids.shape != (n,):
    raise ValueError(f"{name} {ids.shape} should have one id for each of {n} rows")
  return jnp.asarray(ids)


def _sharded(tree, mesh, axis):
  """Shards the rows over `axis`, which a mesh with explicit axes requires of shard_map's inputs."""
  if mesh is None or mesh.axis_types[mesh.axis_names.index(axis)] != AxisType.Explicit:
    return tree
  return jax.reshard(tree, NamedSharding(mesh, P(axis)))


def names():
  """Every name that get() knows."""
  return list(_table(keep=1.0, corrected={}, tcm={}))


def _table(keep, corrected, tcm):
  """Name -> (function of dense.py and streaming.py, its settings). The paper's are all softmax."""
  return {
    "sampled_softmax": ("softmax", dict(scope="query")),
    "snm": ("softmax", dict(scope="query", keep=keep)),
    "l_softmax": ("softmax", dict(scope="query", margin="l_softmax")),
    "a_softmax": ("softmax", dict(scope="query", margin="a_softmax")),
    "cross_example_softmax": ("softmax", dict(scope="batch")),
    "cross_example_negative_mining": ("softmax", dict(scope="batch", keep=keep)),
    "corrected_cross_example_softmax": ("softmax", dict(scope="batch", **corrected)),
    "corrected_cross_example_negative_mining": (
      "softmax",
      dict(scope="batch", keep=keep, **corrected),
    ),
    "symmetric": ("symmetric", {}),
    "tcm": ("tcm", tcm),
    "sigmoid": ("sigmoid", {}),
    "triplet": ("triplet", {}),
    "contrastive": ("contrastive", {}),
  }
