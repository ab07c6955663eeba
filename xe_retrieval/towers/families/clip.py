"""CLIP (Radford et al. 2021): transformers' CLIPTextModel, CLIPVisionModel and CLIPModel."""

import functools

from xe_retrieval.towers.families import bert, vit
from xe_retrieval.towers.families.family import Family, transformers_config

LAYERS = {
  "encoder.layers.#.self_attn.q_proj": "layer_#/query",
  "encoder.layers.#.self_attn.k_proj": "layer_#/key",
  "encoder.layers.#.self_attn.v_proj": "layer_#/value",
  "encoder.layers.#.self_attn.out_proj": "layer_#/attention_out",
  "encoder.layers.#.layer_norm1": "layer_#/attention_norm",
  "encoder.layers.#.layer_norm2": "layer_#/mlp_norm",
  "encoder.layers.#.mlp.fc1": "layer_#/mlp_in",
  "encoder.layers.#.mlp.fc2": "layer_#/mlp_out",
}
WORDS = {
  "embeddings.token_embedding": "embeddings/word",
  "embeddings.position_embedding": "embeddings/position",
}
DROPPED = r"logit_scale|logit_bias|(text|visual)_projection\.weight|.*\.position_ids"
WRONG_EOS = 2  # in config.json of the first CLIPs; the end of text is the highest id then


def text_fields(theirs, file):
  eos = -1 if theirs.eos_token_id == WRONG_EOS else theirs.eos_token_id
  return bert.sizes(theirs, file) | {"pooling": "eos", "eos": eos, "pad": -1, "token_types": 0}


def text_tower(text, *args):
  prescribed = dict(token_types=0, pad=-1, norm=False, causal=True)
  made = bert.tower(text, *args, **prescribed, pre_norm=True, final_norm=True)
  return made.clone(pooling="eos")


def vision_fields(theirs, file):
  return vit.sizes(theirs, file) | {"mlp": theirs.intermediate_size}


def text_export(tower, kind="CLIPText", **more):
  inputs = tower.embeddings
  return transformers_config(
    tower,
    kind,
    vocab_size=inputs.vocab_size,
    max_position_embeddings=inputs.positions,
    attention_dropout=tower.dropout,
    bos_token_id=None,  # its default is no id of a smaller vocabulary
    **({"eos_token_id": WRONG_EOS if tower.eos < 0 else tower.eos} | more),
  )


TEXT = Family(
  name="clip",
  model_types=("clip", "clip_text_model"),
  names=WORDS | LAYERS | {"final_layer_norm": "output/norm"},
  reads=bert.READS,
  fields=text_fields,
  tower=text_tower,
  export=text_export,
  part="text_config",
  prefix="text_model.",
  dropped=rf"vision_model\..*|{DROPPED}",
)
VISION = Family(
  name="clip",
  model_types=("clip", "clip_vision_model"),
  names={
    "embeddings.class_embedding": "embeddings/cls",
    "embeddings.position_embedding": "embeddings/position",
    "embeddings.patch_embedding": "embeddings/patch",
    "pre_layrnorm": "embeddings/norm",  # so misspelt
    "post_layernorm": "output/norm",
  }
  | LAYERS,
  reads=vit.READS,
  fields=vision_fields,
  tower=functools.partial(vit.tower, inputs={"bias": False, "norm": True}),
  export=functools.partial(vit.export, kind="CLIPVision"),
  part="vision_config",
  prefix="vision_model.",
  dropped=rf"text_model\..*|{DROPPED}",
)
