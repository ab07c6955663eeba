"""TFDS builders: one record per image, with all its captions.

Features of every data set: `image` (encoded), `image_id`, `captions` and `text_ids` (equal ids =
equal captions, so that the loss can tell that they are not each other's negatives).
"""

import dataclasses
import io

import numpy as np
from etils import epath
from PIL import Image
from tqdm import tqdm

from xe_retrieval.data import shapes
from xe_retrieval.data.cpu_tensorflow import tf  # noqa: F401  (before tfds: keeps it off accelerators)

import tensorflow_datasets as tfds  # isort: skip

tfds.disable_progress_bar()  # a dozen lines per data set; the builders below show one
SPLITS = ("train", "validation", "test")


@dataclasses.dataclass
class ShapesConfig(tfds.core.BuilderConfig):
  """How many pairs of each split, drawn with which seed."""

  train: int = 20_000
  validation: int = 1_000
  test: int = 2_000
  seed: int = 0


class Shapes(tfds.core.GeneratorBasedBuilder):
  """Drawn scenes with captions whose truth for any scene is known."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, pairs: int = 20_000, seed: int = 0, **kwargs):
    config = ShapesConfig(name=f"{pairs}_seed{seed}", train=pairs, seed=seed)
    super().__init__(**{**kwargs, "config": config, "file_format": "array_record"})

  def _info(self):
    scene = tfds.features.Tensor(shape=(shapes.OBJECTS, 4), dtype=np.int64)
    return self.dataset_info_from_configs(features=features(scene=scene), disable_shuffling=True)

  def _split_generators(self, dl_manager):
    return {split: self._generate_examples(split) for split in SPLITS}

  def _generate_examples(self, split):
    config, image_ids, text_ids = self.builder_config, {}, {}
    for index in tqdm(range(getattr(config, split)), f"drawing {split}", leave=False, delay=1):
      scene = shapes.scene(config.seed, split, index)
      caption = shapes.caption(config.seed, split, index)
      yield (
        index,
        {
          "image": encode_png(shapes.picture(scene)),
          "image_id": image_ids.setdefault(scene.tobytes(), len(image_ids)),
          "captions": [caption],
          "text_ids": [text_ids.setdefault(caption, len(text_ids))],
          "scene": scene.astype(np.int64),
        },
      )


def builder(name: str, directory: str) -> tfds.core.DatasetBuilder:
  """The data set `name` under `directory`, ready to read; `shapes/<pairs>` is made on first use."""
  directory = epath.Path(directory or "~/tensorflow_datasets").expanduser()
  if name.split("/")[0] != "shapes":
    raise ValueError(f"config.data.name: unknown data set {name!r}; allowed: shapes/<pairs>")
  pairs = name.partition("/")[2] or "20000"
  if not pairs.isdigit() or int(pairs) < 1:
    raise ValueError(f"config.data.name: {name!r} should be shapes/<number of pairs>")
  out = Shapes(pairs=int(pairs), data_dir=directory)
  out.download_and_prepare(file_format="array_record")
  return out


def features(**more) -> tfds.features.FeaturesDict:
  """The features that all data sets share, and `more`."""
  return tfds.features.FeaturesDict(
    {
      "image": tfds.features.Image(shape=(None, None, 3)),
      "image_id": np.int64,
      "captions": tfds.features.Sequence(tfds.features.Text()),
      "text_ids": tfds.features.Sequence(np.int64),
      **more,
    }
  )


def encode_png(image: np.ndarray) -> io.BytesIO:
  """uint8 [H, W, 3] -> a PNG file in memory."""
  out = io.BytesIO()
  Image.fromarray(image).save(out, "PNG")
  out.seek(0)
  return out
