"""The families of towers, one file each: a table of names, and fields from config.json."""

from xe_retrieval.towers.families.bert import BERT
from xe_retrieval.towers.families.clip import TEXT as CLIP_TEXT
from xe_retrieval.towers.families.clip import VISION as CLIP_VISION
from xe_retrieval.towers.families.dinov2 import DINOV2
from xe_retrieval.towers.families.distilbert import DISTILBERT
from xe_retrieval.towers.families.mpnet import MPNET
from xe_retrieval.towers.families.resnet import RESNET
from xe_retrieval.towers.families.roberta import ROBERTA
from xe_retrieval.towers.families.siglip import TEXT as SIGLIP_TEXT
from xe_retrieval.towers.families.siglip import VISION as SIGLIP_VISION
from xe_retrieval.towers.families.vit import VIT

FAMILIES = {
  "text": {f.name: f for f in (BERT, DISTILBERT, MPNET, ROBERTA, CLIP_TEXT, SIGLIP_TEXT)},
  "image": {f.name: f for f in (RESNET, VIT, DINOV2, CLIP_VISION, SIGLIP_VISION)},
}
DEFAULT = {"text": "bert", "image": "resnet"}


def of(config, encoder):
  """The family of config.text or config.image; configs of earlier versions name none."""
  name = config[encoder].get("family", "") or DEFAULT[encoder]
  if name not in FAMILIES[encoder]:
    known = ", ".join(FAMILIES[encoder])
    raise ValueError(f"config.{encoder}.family={name!r}: expected one of {known}")
  return FAMILIES[encoder][name]


def for_model_type(encoder, model_type, file):
  """The family of a config.json."""
  for family in FAMILIES[encoder].values():
    if model_type in family.model_types:
      return family
  known = ", ".join(t for f in FAMILIES[encoder].values() for t in f.model_types)
  raise ValueError(f"{file}: model_type is {model_type!r}; {encoder} towers can be {known}")


def settings(config, encoder) -> dict:
  """All fields that the features of a tower depend on, beside its weights and the tokenizer.

  A field that a family does not read is left out: cached features outlive new fields.
  """
  fields, family = config[encoder].to_dict(), of(config, encoder)
  read = {
    *family.reads,
    *{"text": ("tokens", "pooling"), "image": ("size", "mean", "std")}[encoder],
  }
  read |= {"family"} if family.name != DEFAULT[encoder] else set()
  read |= {"resize", "shortest", "resample"} if fields.get("resize", "crop") != "crop" else set()
  return {name: value for name, value in fields.items() if name in read}
