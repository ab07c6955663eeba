"""SigLIP (Zhai et al. 2023): transformers' SiglipTextModel, SiglipVisionModel and SiglipModel."""

import dataclasses
import functools

from xe_retrieval.towers.families import bert, clip, vit
from xe_retrieval.towers.families.family import ROW


def text_fields(theirs, file):
  found = bert.sizes(theirs, file) | {"pooling": "last", "pad": -1, "token_types": 0}
  # The last token is pooled, be it padding: all texts have the length of the pretraining.
  return found | {"head": theirs.projection_size, "tokens": theirs.max_position_embeddings}


def text_tower(text, *args):
  prescribed = dict(token_types=0, pad=-1, norm=False)
  made = bert.tower(text, *args, **prescribed, pre_norm=True, final_norm=True)
  return made.clone(pooling="last", head=text.get("head", text.width))


def text_export(tower):
  return clip.text_export(tower, "SiglipText", eos_token_id=1, projection_size=tower.head)


TEXT = dataclasses.replace(
  clip.TEXT,
  name="siglip",
  model_types=("siglip", "siglip_text_model"),
  names=clip.TEXT.names | {"head": "output/head"},
  fields=text_fields,
  tower=text_tower,
  export=text_export,
)
VISION = dataclasses.replace(
  clip.VISION,
  name="siglip",
  model_types=("siglip", "siglip_vision_model"),
  names={
    "embeddings.position_embedding": "embeddings/position",
    "embeddings.patch_embedding": "embeddings/patch",
    "post_layernorm": "output/norm",
    "head.probe": ("output/probe", ROW),
    "head.attention.in_proj_weight": "output/qkv/kernel",
    "head.attention.in_proj_bias": "output/qkv/bias",
    "head.attention.out_proj": "output/attention_out",
    "head.layernorm": "output/mlp_norm",
    "head.mlp.fc1": "output/mlp_in",
    "head.mlp.fc2": "output/mlp_out",
  }
  | clip.LAYERS,
  tower=functools.partial(vit.tower, inputs={"cls": False}, pooling="attention"),
  export=functools.partial(vit.export, kind="SiglipVision"),
)
