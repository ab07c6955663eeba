"""TFDS builders: one record per image, with all its captions.

Features of every data set: `image` (encoded), `image_id`, `captions` and `text_ids` (equal for
equal captions, so that the loss does not take them as each other's negatives). Prepared data sets
also have `file` and `caption_ids`, human-readable names.
"""

import dataclasses
import io
import os
import re

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from etils import epath
from PIL import Image
from tqdm import tqdm

from xe_retrieval.data import columns, lock, paths, shapes

tfds.disable_progress_bar()  # it shows a dozen bars per data set; `Shapes` shows one
SPLITS = ("train", "validation", "test")


@dataclasses.dataclass
class ShapesConfig(tfds.core.BuilderConfig):
  """Number of pairs in each split, and the seed."""

  train: int = 20_000
  validation: int = 1_000
  test: int = 2_000
  seed: int = 0


class _Quiet:
  """Silences messages about downloads: nothing is downloaded."""

  def _log_download_bytes(self):
    pass

  def _log_download_done(self):
    pass


class Shapes(_Quiet, tfds.core.GeneratorBasedBuilder):
  """Drawn scenes with captions whose truth for any scene is known."""

  VERSION = tfds.core.Version("2.0.0")
  RELEASE_NOTES = {"2.0.0": "Another test split; train and validation are those of 1.0.0."}

  def __init__(self, pairs: int = 20_000, seed: int = 0, **kwargs):
    held_out = {"validation": min(pairs, 1_000), "test": min(pairs, 2_000)}
    config = ShapesConfig(name=f"{pairs}_seed{seed}", train=pairs, seed=seed, **held_out)
    super().__init__(**{**kwargs, "config": config, "file_format": "array_record"})

  def _info(self):
    scene = tfds.features.Tensor(shape=(shapes.OBJECTS, 4), dtype=np.int64)
    return self.dataset_info_from_configs(
      features=features("png", scene=scene), disable_shuffling=True
    )

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
          "image": encode_png(shapes.render(scene)),
          "image_id": image_ids.setdefault(scene.tobytes(), len(image_ids)),
          "captions": [caption],
          "text_ids": [text_ids.setdefault(caption, len(text_ids))],
          "scene": scene.astype(np.int64),
        },
      )


class _Prepared(_Quiet, tfds.core.dataset_builder.FileReaderBuilder, skip_registration=True):
  """A data set made of shards that `python -m xe_retrieval.prepare` wrote."""

  VERSION = tfds.core.Version("1.0.0")
  HOW = "--captions=TABLE --images=DIR"  # flags of `prepare` that make it

  def __init__(self, **kwargs):
    super().__init__(**{**kwargs, "file_format": "array_record"})

  def adopt(self, shards: dict[str, list[tuple[str, int, int]]], files: list, scratch) -> None:
    """Publishes shards, {split: [(path, records, bytes)]}, and `files`, atomically."""
    self._adopted = shards, files
    self.download_and_prepare(file_format="array_record", download_dir=scratch)

  def _info(self):
    text = tfds.features.Text()
    return self.dataset_info_from_configs(
      features=features("jpeg", file=text, caption_ids=tfds.features.Sequence(text)),
      disable_shuffling=True,
    )

  def _download_and_prepare(self, dl_manager, download_config=None):
    shards, files = self._adopted
    for path in files:
      _link(path, self.data_path / epath.Path(path).name)
    splits = []
    for split, parts in shards.items():
      names = self._get_filename_template(split)
      targets = names.sharded_filepaths(len(parts))
      lengths, sizes = [n for _, n, _ in parts], [size for _, _, size in parts]
      if not any(paths.is_remote(path) for path, _, _ in parts):
        for (path, _, _), target in zip(parts, targets, strict=True):
          _link(path, target)
        self._write_columns(split, targets, lengths)
      splits.append(
        tfds.core.SplitInfo(
          name=split, shard_lengths=lengths, num_bytes=sum(sizes), filename_template=names
        )
      )
    self.info.set_splits(tfds.core.splits.SplitDict(splits))

  def _write_columns(self, split, shards, lengths):
    def blocks():
      for path, count in zip(shards, lengths, strict=True):
        reader = array_record_module.ArrayRecordReader(str(path))
        for i in range(0, count, columns.BLOCK):
          yield reader.read(i, min(i + columns.BLOCK, count))
        reader.close()

    names = [name for name in self.info.features if name != "image"]
    total = -(-sum(lengths) // columns.BLOCK)
    shown = tqdm(blocks(), f"columns of {split}", total, leave=False, delay=2)
    columns.write(self.data_path / "columns" / split, shards, names, sum(lengths), shown)


class ConceptualCaptions(_Prepared):
  """Images of the web with their alt texts, from the shards of img2dataset."""

  HOW = "--webdataset='train=cc/train/{00000..00331}.tar'"


class Flickr30k(_Prepared):
  """31,783 photos with five captions each, in Karpathy's split."""

  HOW = "--flickr30k=dataset_flickr30k.json --images=DIR"


class Captions(_Prepared):
  """Any table of images and captions."""

  def __init__(self, name: str = "default", **kwargs):
    config = tfds.core.BuilderConfig(name=name, version=self.VERSION)
    super().__init__(**{**kwargs, "config": config})


def builder(name: str, directory: str) -> tfds.core.DatasetBuilder:
  """The data set `name` under `directory`, ready to read; `shapes/<pairs>` is made on first use."""
  # ArrayRecord reads at random places of a file, and only of a local one.
  directory = paths.local(directory or "~/tensorflow_datasets", "config.data.dir")
  kind, _, rest = name.partition("/")
  if kind == "shapes":
    return _shapes(name, rest or "20000", directory)
  out = prepared(name, directory)
  if out is None and (path := _prepared_directory(name)):
    return tfds.builder_from_directory(path)
  if out is None:
    raise ValueError(
      f"config.data.name: unknown data set {name!r}; allowed: shapes/<pairs>, "
      "conceptual_captions, flickr30k, captions/<name>, or the directory of a prepared one"
    )
  if not out.is_prepared():
    named = f" --name={rest}" if kind == "captions" else ""
    raise ValueError(
      f"config.data.name: {name} is not yet under {directory}; this makes it: "
      f"python -m xe_retrieval.prepare {out.HOW}{named} --out={directory}"
    )
  return out


def prepared(name: str, directory) -> _Prepared | None:
  """The builder of a data set that `prepare` makes, made or not; None for other names."""
  kind, _, rest = name.partition("/")
  if kind == "captions" and re.fullmatch(r"\w[\w.-]*", rest):
    return Captions(name=rest, data_dir=directory)
  plain = {"conceptual_captions": ConceptualCaptions, "flickr30k": Flickr30k}
  return plain[name](data_dir=directory) if name in plain else None


def register(name: str, directory, shards: dict, files: list, scratch) -> dict[str, list[str]]:
  """Publishes finished shards of `prepare` as the data set `name` under `directory`.

  Returns their names. Remote ones, gs://…, are only named: the caller copies them.
  """
  made = prepared(name, directory)
  made.adopt(shards, files, scratch)
  return {split: list(made.info.splits[split].filenames) for split in shards}


def title(name: str, builder: tfds.core.DatasetBuilder) -> str:
  """The display name of the data set `name`, which may be a directory."""
  known = name.partition("/")[0] in ("shapes", "captions", "conceptual_captions", "flickr30k")
  return name if known else builder.info.full_name.removesuffix(f"/{builder.info.version}")


def features(encoding: str, **more) -> tfds.features.FeaturesDict:
  """The features that all data sets share, and `more`."""
  return tfds.features.FeaturesDict(
    {
      "image": tfds.features.Image(shape=(None, None, 3), encoding_format=encoding),
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


def _shapes(name, pairs, directory):
  if not pairs.isdigit() or int(pairs) < 1:
    raise ValueError(f"config.data.name: {name!r} should be shapes/<number of pairs>")
  if not Shapes(pairs=int(pairs), data_dir=directory).is_prepared():
    with lock.creating(directory / f"shapes_{pairs}"):
      Shapes(pairs=int(pairs), data_dir=directory).download_and_prepare(file_format="array_record")
  return Shapes(pairs=int(pairs), data_dir=directory)


def _prepared_directory(name):
  """The directory itself, or the latest version in it."""
  path = epath.Path(name).expanduser()
  if not path.is_dir():
    return None
  found = [p for p in (path, *sorted(path.iterdir())) if (p / "dataset_info.json").exists()]
  return found[0 if found[:1] == [path] else -1] if found else None


def _link(path, target):
  try:
    os.link(path, target)
  except OSError:  # another file system
    epath.Path(path).copy(target)
