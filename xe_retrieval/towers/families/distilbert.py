"""DistilBERT (Sanh et al. 2019): BERT without token types, under other names."""

import dataclasses
import functools

from xe_retrieval.towers.families import bert
from xe_retrieval.towers.families.family import require
from xe_retrieval.towers.transformer import ACTIVATIONS

NORM_EPS = 1e-12  # not in its config
NAMES = bert.EMBEDDINGS | {
  "transformer.layer.#.attention.q_lin": "layer_#/query",
  "transformer.layer.#.attention.k_lin": "layer_#/key",
  "transformer.layer.#.attention.v_lin": "layer_#/value",
  "transformer.layer.#.attention.out_lin": "layer_#/attention_out",
  "transformer.layer.#.sa_layer_norm": "layer_#/attention_norm",
  "transformer.layer.#.ffn.lin1": "layer_#/mlp_in",
  "transformer.layer.#.ffn.lin2": "layer_#/mlp_out",
  "transformer.layer.#.output_layer_norm": "layer_#/mlp_norm",
}


def fields(theirs, file):
  return {
    "vocab_size": theirs.vocab_size,
    "layers": theirs.n_layers,
    "width": theirs.dim,
    "heads": theirs.n_heads,
    "mlp": theirs.hidden_dim,
    "positions": theirs.max_position_embeddings,
    "norm_eps": NORM_EPS,
    "activation": require(file, "activation", theirs.activation, *ACTIVATIONS),
    "token_types": 0,
    "pad": theirs.pad_token_id,
  }


def export(tower):
  from transformers import DistilBertConfig

  return DistilBertConfig(
    architectures=["DistilBertModel"],
    vocab_size=tower.embeddings.vocab_size,
    n_layers=tower.layers,
    dim=tower.width,
    n_heads=tower.heads,
    hidden_dim=tower.mlp,
    max_position_embeddings=tower.embeddings.positions,
    activation=tower.activation,
    dropout=tower.dropout,
    attention_dropout=tower.dropout,
    pad_token_id=tower.embeddings.pad,
  )


DISTILBERT = dataclasses.replace(
  bert.BERT,
  name="distilbert",
  model_types=("distilbert",),
  names=NAMES,
  fields=fields,
  tower=functools.partial(bert.tower, token_types=0),
  export=export,
  aliases=((r"^distilbert\.", ""),),
  dropped=bert.HEADS + r"|pre_classifier\..*",
)
