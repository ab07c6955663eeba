"""DINOv2 (Oquab et al. 2023), with or without registers (Darcet et al. 2024): ViT with learned
factors per channel, its positions interpolated from 518 pixels to the size in use."""

from xe_retrieval.towers.families import vit
from xe_retrieval.towers.families.family import ROWS, Family, require

NAMES = (
  vit.EMBEDDINGS
  | vit.ATTENTION
  | {
    "embeddings.register_tokens": ("embeddings/registers", ROWS),
    "encoder.layer.#.norm1": "layer_#/attention_norm",
    "encoder.layer.#.layer_scale1.lambda1": "layer_#/attention_scale",
    "encoder.layer.#.norm2": "layer_#/mlp_norm",
    "encoder.layer.#.layer_scale2.lambda1": "layer_#/mlp_scale",
    "encoder.layer.#.mlp.fc1": "layer_#/mlp_in",
    "encoder.layer.#.mlp.fc2": "layer_#/mlp_out",
    "layernorm": "output/norm",
  }
)


def fields(theirs, file):
  require(file, "use_swiglu_ffn", theirs.use_swiglu_ffn, False)  # only the giant model has it
  require(file, "qkv_bias", theirs.qkv_bias, True)
  found = vit.sizes(theirs, file) | {"mlp": int(theirs.hidden_size * theirs.mlp_ratio)}
  return found | {"registers": getattr(theirs, "num_register_tokens", 0)}


def tower(image, *args):
  inputs = {"registers": image.get("registers", 0)}
  return vit.tower(image, *args, inputs, norm_eps=1e-6, layer_scale=True)


def export(tower):
  more = {"mlp_ratio": tower.mlp // tower.width, "use_mask_token": False}
  if not tower.embeddings.registers:
    return vit.export(tower, "Dinov2", **more)
  del more["use_mask_token"]
  registers = tower.embeddings.registers
  return vit.export(tower, "Dinov2WithRegisters", num_register_tokens=registers, **more)


DINOV2 = Family(
  name="dinov2",
  model_types=("dinov2", "dinov2_with_registers"),
  names=NAMES,
  reads=vit.READS,
  fields=fields,
  tower=tower,
  export=export,
  aliases=((r"^dinov2(_with_registers)?\.", ""), *vit.ALIASES),
  dropped=vit.HEADS,
)
