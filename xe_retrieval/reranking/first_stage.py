"""The first stage: a trained dual encoder, what it scores highest, and its towers' tokens."""

import dataclasses
import functools
import hashlib
import json

import numpy as np

from xe_retrieval.calibration import run as runs
from xe_retrieval.data import paths, pipeline
from xe_retrieval.evaluation import score_tiles
from xe_retrieval.evaluation.embedded import Pairs
from xe_retrieval.reranking import token_tables
from xe_retrieval.training import features

AT_ONCE = 2**24  # scores in memory


@dataclasses.dataclass(frozen=True)
class Split:
  """A split as the first stage and its towers see it."""

  source: pipeline.Source
  pairs: Pairs  # whose products are the first stage's scores, corrected if its config says so
  image_of_record: np.ndarray  # int64 [R]: rows of the images, of which several records may be one
  record_of_image: np.ndarray  # int64 [M]
  tokens: token_tables.Tokens  # of the captions
  grid: np.ndarray  # float16 [R, places, width]

  def image_tokens(self, images):  # int [n] -> float16 [n, places, width]
    """Sorted reads: a table of many gigabytes is on disk."""
    records, back = np.unique(self.record_of_image[images], return_inverse=True)
    return self.grid[records][back]

  @functools.cached_property
  def owners(self):
    """The images that a caption is no wrong caption of: its own, and those of equal captions."""
    ids = self.source.column("text_ids").flat
    _, group = np.unique(ids, return_inverse=True)
    both = np.unique(np.stack([group, self.pairs.image_of_text], axis=1), axis=0)
    starts = np.searchsorted(both[:, 0], np.arange(group.max() + 2))
    return Owners(group, starts, both[:, 1])


@dataclasses.dataclass(frozen=True)
class Owners:
  group: np.ndarray  # int [Q]: equal captions have one number
  starts: np.ndarray  # int [groups + 1]
  images: np.ndarray  # int [at least groups]

  def of(self, caption) -> np.ndarray:
    """Rows of the images of one caption."""
    group = self.group[caption]
    return self.images[self.starts[group] : self.starts[group + 1]]

  def negative(self, captions, images):
    """int [B], int [N] or [B, N] -> bool [B, N]: the image is a wrong one for the caption."""
    images = np.broadcast_to(images, (len(captions), images.shape[-1]))
    return ~np.array([np.isin(row, self.of(c)) for c, row in zip(captions, images, strict=True)])


class FirstStage:
  """A workdir's dual encoder at its best or latest checkpoint."""

  def __init__(self, workdir, checkpoint="best", run=None):
    if not run and not (paths.given(workdir) / "config.json").exists():
      raise ValueError(
        f"config.first_stage={str(workdir)!r} should be the workdir of a trained dual encoder"
      )
    self.run = run or runs.Run(workdir, checkpoint=checkpoint)
    encoder = self.run.encoder
    self.config = encoder.config
    # A CLIP learns its scale.
    self.scale = (
      float(np.exp(encoder.learned["log_scale"]))
      if "log_scale" in encoder.learned
      else (float(self.config.scale))
    )
    self.towers = token_tables.Towers(self.config, encoder.variables, encoder.tokenizer)

  def split(self, name, dataset="", pairs=None) -> Split:
    """`pairs` are those of the split, where they were embedded and corrected before."""
    source = pipeline.Source(dataset or self.config.data.name, self.config.data.dir, name)
    pairs = pairs or self.run.correct(self.run.embed(dataset, name)[0])
    _, first, image_of_record = np.unique(
      source.column("image_id"), return_index=True, return_inverse=True
    )
    tokens, grid = self.towers.tables(source)
    return Split(source, pairs, image_of_record, first, tokens, grid)

  def mined(self, split: Split, count: int) -> np.ndarray:
    """The `count` wrong images that score highest, for every caption: int32 [Q, count], cached."""
    about = [self.run.fingerprint, split.source.fingerprint(), count]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]
    path = features.directory(self.config) / f"{split.source.split}-candidates-{key}.npy"
    pairs = split.pairs
    count = min(count, len(pairs.image) - 1)

    def compute(spans):
      for rows in spans:
        yield candidates(pairs.text[rows], pairs.image, count, _exclude(split.owners, rows))

    def write(path):
      spans = score_tiles.spans(len(pairs.text), max(AT_ONCE // len(pairs.image), 1))
      features.write(path, spans, compute, count, np.int32, "captions' hardest images")

    return features.cached(path, write)


def _exclude(owners, rows):
  """A function that lowers the scores [q, M] of right images; rows: slice of the captions."""

  def exclude(scores):
    for row, caption in zip(scores, range(rows.start, rows.stop), strict=True):
      row[owners.of(caption)] = -np.inf

  return exclude


def candidates(text, image, count, exclude=lambda scores: None):
  """[Q, D], [M, D] -> int32 [Q, count]: the images that score highest, best first.

  Exact, by all scores. Equal scores keep the order of the images.
  """
  parts = []
  for rows in score_tiles.spans(len(text), max(AT_ONCE // len(image), 1)):
    scores = score_tiles.product(text[rows], image)
    exclude(scores)
    top = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    top.sort(axis=1)
    order = np.argsort(-np.take_along_axis(scores, top, axis=1), axis=1, kind="stable")
    parts.append(np.take_along_axis(top, order, axis=1).astype(np.int32))
  return np.concatenate(parts)


def scores_of(text, image, rows):
  """[Q, D], [M, D], int [Q, K] -> float32 [Q, K]: the scores of chosen images."""
  out = np.empty(rows.shape, np.float32)
  for span in score_tiles.spans(len(text), max(AT_ONCE // rows.shape[1] // 64, 1)):
    out[span] = np.einsum("qd,qkd->qk", text[span], image[rows[span]], optimize=True)
  return out
