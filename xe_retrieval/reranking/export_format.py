"""An exported re-ranker: a directory that reads back like its workdir, or with jax alone.

config.json, joint.safetensors  the weights, named like "layer_0.projections.qkv.kernel"
reranking.json                  how its logits are added to the first stage, if it was evaluated
image_tokens.jax, logits.jax    jax.export functions, weights inside: float16 tokens of a tower
                                [N, places, width] -> float32 [N, tokens, width]; these, text tokens
                                [B, T, width], bool [B, T], int32 [B, K] rows and the first stage's
                                scores [B, K] -> float32 logits [B, K]
"""

import pathlib
import shutil

import jax
import jax.numpy as jnp
from flax import traverse_util
from safetensors.numpy import save_file

from xe_retrieval import config as config_lib
from xe_retrieval.reranking import evaluation
from xe_retrieval.reranking.scorer import WEIGHTS
from xe_retrieval.towers import joint
from xe_retrieval.towers.export_format import PLATFORMS


def write(scorer, workdir, out) -> pathlib.Path:
  """A scorer.Scorer as a new directory; `workdir` is where it was restored from."""
  out = pathlib.Path(out).expanduser()
  if out.exists() and any(out.iterdir()):
    raise ValueError(f"{out} is not empty; choose a new directory")
  part = out.with_name(out.name + ".part")
  shutil.rmtree(part, ignore_errors=True)
  part.mkdir(parents=True)
  save_file(traverse_util.flatten_dict(jax.device_get(scorer.params), sep="."), part / WEIGHTS)
  (part / "config.json").write_text(config_lib.to_json(scorer.config))
  mixture = evaluation.read(workdir)
  if mixture and mixture.reranker == scorer.fingerprint:
    mixture.write(part)
  for name, (function, inputs) in functions(scorer).items():
    exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)
    (part / f"{name}.jax").write_bytes(exported(*inputs).serialize())
  if out.exists():
    out.rmdir()
  part.rename(out)
  return out


def functions(scorer) -> dict:
  """{"image_tokens": (function, its inputs as shapes), "logits": …}, for any N, B, T and K."""
  config, model = scorer.config, joint.from_config(scorer.config)
  variables = {"params": jax.device_get(scorer.params)}
  n, b, t, k = jax.export.symbolic_shape("n, b, t, k")

  def image_tokens(image):
    return model.apply(variables, image, method="image_tokens").astype(jnp.float32)

  def logits(text, known, image, rows, first):
    return model.apply(variables, text, known, image, rows, config.scale * first, method="logits")

  like, sizes = jax.ShapeDtypeStruct, config.tokens
  image = like((n, sizes.places, sizes.image_width), jnp.float16)
  lists = (
    like((b, t, sizes.text_width), jnp.float16),
    like((b, t), jnp.bool_),
    like((n, *scorer.image_shape), jnp.float16),
    like((b, k), jnp.int32),
    like((b, k), jnp.float32),
  )
  return {"image_tokens": (image_tokens, (image,)), "logits": (logits, lists)}
