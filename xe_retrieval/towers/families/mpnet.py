"""MPNet (Song et al. 2020): RoBERTa's positions, and a bias of attention by relative position."""

import dataclasses
import functools

from xe_retrieval.towers.families import bert
from xe_retrieval.towers.families.family import require

BUCKETS = 32  # transformers uses this many, whatever config.json says
PAD = 1  # likewise
NAMES = bert.EMBEDDINGS | {
  "encoder.relative_attention_bias": "embeddings/relative",
  "encoder.layer.#.attention.attn.q": "layer_#/query",
  "encoder.layer.#.attention.attn.k": "layer_#/key",
  "encoder.layer.#.attention.attn.v": "layer_#/value",
  "encoder.layer.#.attention.attn.o": "layer_#/attention_out",
  "encoder.layer.#.attention.LayerNorm": "layer_#/attention_norm",
  "encoder.layer.#.intermediate.dense": "layer_#/mlp_in",
  "encoder.layer.#.output.dense": "layer_#/mlp_out",
  "encoder.layer.#.output.LayerNorm": "layer_#/mlp_norm",
}


def fields(theirs, file):
  require(file, "relative_attention_num_buckets", theirs.relative_attention_num_buckets, BUCKETS)
  return bert.sizes(theirs, file) | {"token_types": 0, "pad": PAD}


def tower(text, *args):
  made = bert.tower(text, *args, token_types=0, after_pad=True, pad=PAD)
  return made.clone(embeddings=made.embeddings.clone(buckets=BUCKETS))


MPNET = dataclasses.replace(
  bert.BERT,
  name="mpnet",
  model_types=("mpnet",),
  names=NAMES,
  fields=fields,
  tower=tower,
  export=functools.partial(bert.export, kind="MPNet", relative_attention_num_buckets=BUCKETS),
  aliases=((r"^mpnet\.", ""),),
)
