"""ViT (Dosovitskiy et al. 2021) as transformers' ViTModel; the other image towers build on it."""

from xe_retrieval.towers.families.family import ROW, ROWS, Family, require, transformers_config
from xe_retrieval.towers.inputs import Patches
from xe_retrieval.towers.transformer import ACTIVATIONS, Transformer

EMBEDDINGS = {
  "embeddings.cls_token": ("embeddings/cls", ROW),
  "embeddings.position_embeddings": ("embeddings/position/embedding", ROWS),
  "embeddings.patch_embeddings.projection": "embeddings/patch",
}
ATTENTION = {
  "encoder.layer.#.attention.attention.query": "layer_#/query",
  "encoder.layer.#.attention.attention.key": "layer_#/key",
  "encoder.layer.#.attention.attention.value": "layer_#/value",
  "encoder.layer.#.attention.output.dense": "layer_#/attention_out",
}
NAMES = (
  EMBEDDINGS
  | ATTENTION
  | {
    "encoder.layer.#.layernorm_before": "layer_#/attention_norm",
    "encoder.layer.#.layernorm_after": "layer_#/mlp_norm",
    "encoder.layer.#.intermediate.dense": "layer_#/mlp_in",
    "encoder.layer.#.output.dense": "layer_#/mlp_out",
    "layernorm": "output/norm",
  }
)
ALIASES = (  # names within transformers 5, which writes the older ones
  (r"\.attention\.q_proj\.", ".attention.attention.query."),
  (r"\.attention\.k_proj\.", ".attention.attention.key."),
  (r"\.attention\.v_proj\.", ".attention.attention.value."),
  (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
READS = ("patch", "grid", "blocks", "width", "heads", "mlp", "norm_eps", "activation", "pooling")
READS += ("registers", "layers")
HEADS = r"pooler\..*|classifier\..*|embeddings\.mask_token"


def fields(theirs, file):
  require(file, "qkv_bias", getattr(theirs, "qkv_bias", True), True)
  return sizes(theirs, file) | {"mlp": theirs.intermediate_size}


def sizes(theirs, file):
  """The fields that image towers have under the same names."""
  require(file, "num_channels", theirs.num_channels, 3)
  size, patch = theirs.image_size, theirs.patch_size
  for name, value in (("image_size", size), ("patch_size", patch)):
    if not isinstance(value, int):
      raise ValueError(f"{file}: {name} is {value!r}; this tower can only take squares")
  return {
    "patch": patch,
    "grid": size // patch,
    "blocks": theirs.num_hidden_layers,
    "width": theirs.hidden_size,
    "heads": theirs.num_attention_heads,
    "norm_eps": theirs.layer_norm_eps,
    "activation": require(file, "hidden_act", theirs.hidden_act, *ACTIVATIONS),
  }


def tower(image, frozen, dtype, remat, inputs=None, norm_eps=1e-12, pooling="cls", **more):
  """Any ViT of config.image; `inputs`, `pooling` and the rest are what its family prescribes."""
  eps, dropout = image.get("norm_eps", norm_eps), image.get("dropout", 0.0)
  embeddings = Patches(
    patch=image.patch,
    grid=image.get("grid", image.size // image.patch),
    width=image.width,
    dropout=dropout,
    norm_eps=eps,
    dtype=dtype,
    **(inputs or {}),
  )
  return Transformer(
    embeddings,
    layers=image.blocks,
    width=image.width,
    heads=image.heads,
    mlp=image.mlp,
    pre_norm=True,
    final_norm=True,
    activation=image.get("activation", "gelu"),
    pooling=image.get("pooling", "") or pooling,
    chosen=tuple(image.get("layers", ())),
    dropout=dropout,
    norm_eps=eps,
    frozen=frozen,
    dtype=dtype,
    remat=remat,
    **more,
  )


def export(tower, kind="ViT", **more):
  """A tower -> the transformers config of its kind."""
  patch, grid = tower.embeddings.patch, tower.embeddings.grid
  return transformers_config(tower, kind, patch_size=patch, image_size=patch * grid, **more)


VIT = Family(
  name="vit",
  model_types=("vit",),
  names=NAMES,
  reads=READS,
  fields=fields,
  tower=tower,
  export=export,
  aliases=(
    (r"^vit\.", ""),  # of models saved with a head
    (r"^layers\.", "encoder.layer."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    *ALIASES,
  ),
  dropped=HEADS,
)
