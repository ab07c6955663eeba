"""One evaluation of a trained model: its data, what is searched besides, what its scores mean."""

import dataclasses
import functools
import hashlib
import pathlib
import sys

from xe_retrieval import model as models
from xe_retrieval.calibration import artifact, keywords, promises
from xe_retrieval.data import image_folder, paths, pipeline
from xe_retrieval.embed import directory, embedded_source
from xe_retrieval.evaluation import embedded
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.towers import bank as banks
from xe_retrieval.towers import sentence_encoder
from xe_retrieval.training import features, processes


class Run:
  """A model, its data, and the images that are searched besides.

  `plain_distractors` have unit vectors, `distractors` those of the scores in use. With several
  processes, all walk the same path; process 0 writes. Under `scratch` lies what an interrupted run
  has embedded.
  """

  def __init__(self, workdir, distractors=(), people=None, checkpoint="best", scratch=None):
    self.workdir, self.people, self._scratch = paths.given(workdir), people, scratch
    self.encoder = models.restore(self.workdir, checkpoint)
    self.config = self.encoder.config
    self.calibration_split = self.config.get("calibration_split", "validation")
    self.names = list(distractors)
    self.plain_distractors = [self._images(text) for text in distractors]
    self.distractors = [self._corrected(images) for images in self.plain_distractors]
    self._sentences = None

  def embed(self, dataset, split):
    """-> Pairs of a split as unit vectors, and what its data set is called."""
    source = self._source(dataset or self.config.data.name, split)
    tables = features.of(self.encoder, source)
    return embedded.embed(self.encoder, source, tables, self._place(source)), source.name

  def correct(self, pairs):
    """Pairs with unit vectors -> with those whose products are the scores in use."""
    text = self.scoring.text(pairs.text, pairs.features)
    return dataclasses.replace(pairs, text=text, images=self._corrected(pairs.images))

  def sources(self, pairs):
    """Every source of relevance that these data have."""
    return relevances.sources(pairs, self.distractors, self.people, self._sentence_encoder())

  def calibrate(self, pairs, sources, dataset, split):
    """Fits what scores mean on these pairs, by each source of relevance."""
    about = {
      "model": self.fingerprint,
      "dataset": dataset,
      "split": split,
      "step": self.encoder.step,
      "queries": len(pairs.text),
      "images": len(pairs.image),
      "distractors": self.names,
    }
    gallery = [pairs.images, *self.distractors]
    return artifact.make(pairs, gallery, sources, self.bank, about, self.words(pairs))

  def words(self, pairs):
    """Pairs with queries of a few words, made of the captions; None where too few can be made.

    What is true of drawn scenes is known, and their captions are vague and precise, short and long.
    """
    if self.bank is None or pairs.images.captions is None or pairs.images.scenes is not None:
      return None
    known = keywords.Vocabulary(self.bank)
    queries, images = keywords.draw(pairs.captions, pairs.image_of_text, known)
    if len(queries) < keywords.FEWEST:
      return None
    tower = self.encoder.text_features(queries)
    text = self.scoring.text(self.encoder.project_text(tower), tower)
    return dataclasses.replace(
      pairs, text=text, image_of_text=images, captions=queries, caption_ids=None, features=tower
    )

  def calibration(self):
    """That of the workdir; if it has none of this checkpoint, it is made and written."""
    if known := self._read(artifact.read, "calibrated anew"):
      return known
    try:
      pairs, name = self.embed("", self.calibration_split)
    except ValueError as e:
      _say(f"not calibrated: {e}")
      return None
    pairs = self.correct(pairs)
    made = self.calibrate(pairs, self.sources(pairs), name, self.calibration_split)
    if processes.is_primary():
      made.write(self.workdir)
    return made

  def judge(self, calibration, pairs, sources, metrics, seen):
    """Adds how true probabilities and promises are here; not of the pairs they were chosen on."""
    galleries = [[pairs.images]]
    galleries += [[pairs.images, *self.distractors]] if self.distractors else []
    asked = [(pairs, sources)]
    if calibration.words and (words := self.words(pairs)):
      asked.append((words, [keywords.relevance(words.captions, galleries[-1])]))
    shown = [{} for _ in galleries]
    for gallery, found in zip(galleries, shown, strict=True):
      for queries, known in asked:
        found |= promises.shown_probability(calibration, queries, gallery, known)
    best = next(iter(shown[0].values()), {})
    metrics["calibration"] |= {key: best.get(key) for key in ("ece", "brier")}
    metrics["probabilities"] = {
      "seen": seen,
      "relevance": calibration.best.relevance,
      "calibrated_on": calibration.measured_on(),
      "galleries": [
        {"images": sum(len(p.vectors) for p in g), "relevance": s}
        for g, s in zip(galleries, shown, strict=True)
      ],
    }
    metrics["promises"] = []
    for gallery in () if seen else galleries:
      for queries, known in asked:
        metrics["promises"] += promises.judge(calibration, queries, gallery, known)

  def training_pairs(self):
    """How many captions the model was trained on; None of a stock CLIP, or without its data."""
    if self.config.get("steps") == 0:
      return None
    try:
      return self._source(self.config.data.name, "train").pairs
    except ValueError:
      return None

  @functools.cached_property
  def fingerprint(self):
    return self.encoder.fingerprint()

  @functools.cached_property
  def bank(self):
    """That of the workdir, made now if there is none of this model; None: its data are gone."""
    if known := self._read(banks.read, "made anew"):
      return known
    try:
      source = self._source(self.config.data.name, "train")
    except ValueError as e:
      _say(f"no bank of training captions: {e}")
      return None
    size = self.config.get("bank", {}).get("size", banks.SIZE)
    made = banks.make(self.encoder, source, features.of(self.encoder, source), size)
    if processes.is_primary():
      made.write(self.workdir / banks.NAME)
    return made

  def _read(self, read, otherwise):
    """What the workdir has of this model; None in all processes if one of them finds nothing."""
    found, why = None, ""
    try:
      found = read(self.workdir, self.fingerprint)
    except ValueError as e:
      why = f"{otherwise}: {e}"
    if "" not in processes.exchange("workdir", "there" if found else ""):
      return found
    if why:
      _say(why)
    return None

  @functools.cached_property
  def scoring(self):
    return banks.Scoring(self.config, self.bank if banks.correction(self.config) else None)

  def _corrected(self, images):
    return dataclasses.replace(images, vectors=self.scoring.image(images.vectors))

  def _sentence_encoder(self):
    """The one that tells which captions say the same; None if there is none at hand."""
    path = self.config.get("caption_encoder", "")
    if path and self._sentences is None:
      try:
        self._sentences = sentence_encoder.load(path, features.directory(self.config))
      except (OSError, ValueError) as e:
        _say(f"relevance by captions is left out: {e}")
    return self._sentences

  def _source(self, name, split):
    return pipeline.Source(name, self.config.data.dir, split)

  def _images(self, text):
    if directory.is_one(text):
      there = embedded_source.open_directory(text, self.fingerprint)
      return embedded.Images(there.vectors())
    source = image_folder.open_images(text, self.config.data.dir)
    tables = features.of(self.encoder, source, ("image",))
    return embedded.images(self.encoder, source, tables, self._place(source))

  def _place(self, source):
    """Where shards of embeddings of this model and split lie until the evaluation is complete."""
    if self._scratch is None:
      return None
    key = hashlib.sha256(f"{self.fingerprint} {source.fingerprint()}".encode()).hexdigest()[:20]
    return pathlib.Path(self._scratch) / f"{source.split}-{key}"


def _say(line):
  if processes.is_primary():
    print(line, file=sys.stderr)
