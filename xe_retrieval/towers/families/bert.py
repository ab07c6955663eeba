"""BERT (Devlin et al. 2018) as transformers' BertModel; RoBERTa, DistilBERT, MPNet build on it."""

from xe_retrieval.towers.families.family import Family, require, transformers_config
from xe_retrieval.towers.inputs import Tokens
from xe_retrieval.towers.transformer import ACTIVATIONS, Transformer

EMBEDDINGS = {
  "embeddings.word_embeddings": "embeddings/word",
  "embeddings.position_embeddings": "embeddings/position",
  "embeddings.token_type_embeddings": "embeddings/token_type",
  "embeddings.LayerNorm": "embeddings/norm",
}
NAMES = EMBEDDINGS | {
  "encoder.layer.#.attention.self.query": "layer_#/query",
  "encoder.layer.#.attention.self.key": "layer_#/key",
  "encoder.layer.#.attention.self.value": "layer_#/value",
  "encoder.layer.#.attention.output.dense": "layer_#/attention_out",
  "encoder.layer.#.attention.output.LayerNorm": "layer_#/attention_norm",
  "encoder.layer.#.intermediate.dense": "layer_#/mlp_in",
  "encoder.layer.#.output.dense": "layer_#/mlp_out",
  "encoder.layer.#.output.LayerNorm": "layer_#/mlp_norm",
}
READS = ("vocab_size", "layers", "width", "heads", "mlp", "positions", "token_types", "norm_eps")
READS += ("activation", "pad", "eos", "head")
HEADS = r"pooler\..*|cls\..*|lm_head\..*|classifier\..*|qa_outputs\..*|vocab_\w+\..*"
HEADS += r"|embeddings\.position_ids|.*\.adam_[mv]|global_step"


def fields(theirs, file):
  require(
    file,
    "position_embedding_type",
    getattr(theirs, "position_embedding_type", "absolute"),
    "absolute",
  )
  found = sizes(theirs, file) | {"token_types": theirs.type_vocab_size}
  return found | ({"pad": theirs.pad_token_id} if theirs.pad_token_id else {})


def sizes(theirs, file):
  """The fields that most text towers have under the same names."""
  act = require(file, "hidden_act", theirs.hidden_act, *ACTIVATIONS)
  return {
    "vocab_size": theirs.vocab_size,
    "layers": theirs.num_hidden_layers,
    "width": theirs.hidden_size,
    "heads": theirs.num_attention_heads,
    "mlp": theirs.intermediate_size,
    "positions": theirs.max_position_embeddings,
    "norm_eps": theirs.layer_norm_eps,
  } | ({} if act == "gelu" else {"activation": act})


def tower(
  text, frozen, dtype, remat, token_types=2, after_pad=False, pad=0, norm=True, causal=False, **more
):
  """Any text tower of config.text; the other arguments are what its family prescribes."""
  embeddings = Tokens(
    vocab_size=text.vocab_size,
    positions=text.get("positions", text.tokens + (after_pad and text.get("pad", pad) + 1)),
    width=text.width,
    token_types=text.get("token_types", token_types),
    norm=norm,
    pad=text.get("pad", pad),
    after_pad=after_pad,
    causal=causal,
    heads=text.heads,
    dropout=text.dropout,
    norm_eps=text.get("norm_eps", 1e-12),
    dtype=dtype,
  )
  return Transformer(
    embeddings,
    layers=text.layers,
    width=text.width,
    heads=text.heads,
    mlp=text.mlp,
    activation=text.get("activation", "gelu"),
    pooling=text.pooling,
    eos=text.get("eos", -1),
    head=text.get("head", 0),
    dropout=text.dropout,
    norm_eps=text.get("norm_eps", 1e-12),
    frozen=frozen,
    dtype=dtype,
    remat=remat,
    **more,
  )


def export(tower, kind="Bert", **more):
  """A tower -> the transformers config of its kind."""
  inputs = tower.embeddings
  return transformers_config(
    tower,
    kind,
    vocab_size=inputs.vocab_size,
    max_position_embeddings=inputs.positions,
    hidden_dropout_prob=tower.dropout,
    attention_probs_dropout_prob=tower.dropout,
    pad_token_id=inputs.pad,
    **({"type_vocab_size": inputs.token_types} if inputs.token_types else {}),
    **more,
  )


BERT = Family(
  name="bert",
  model_types=("bert",),
  names=NAMES,
  reads=READS,
  fields=fields,
  tower=tower,
  export=export,
  aliases=(
    (r"^bert\.", ""),  # of models saved with a head
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),  # of the original release
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
  ),
  dropped=HEADS,
)
