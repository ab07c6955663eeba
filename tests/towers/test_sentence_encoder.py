"""Vectors of captions by a sentence encoder, kept in a directory that several runs share."""

import shutil
from concurrent import futures

import numpy as np
from etils import epath

from tests.towers.conftest import REFERENCES
from xe_retrieval.data import tokenization
from xe_retrieval.towers import sentence_encoder

CAPTIONS = ["a red dog", "a dog", "two dogs on a red ball", "a red dog"]


def test_two_runs_that_need_the_same_captions_encode_them_once(tmp_path):
  directory, cache = tmp_path / "bert", epath.Path(tmp_path / "cache")
  shutil.copytree(REFERENCES / "bert", directory)
  tokenization.train(CAPTIONS, 40, 8).save(directory)
  cache.mkdir()
  encoders = [sentence_encoder.load(str(directory), cache) for _ in range(2)]
  with futures.ThreadPoolExecutor(2) as threads:
    one, other = threads.map(lambda encode: encode(CAPTIONS), encoders)
  np.testing.assert_array_equal(one, other)
  np.testing.assert_allclose(one, sentence_encoder.load(str(directory))(CAPTIONS), atol=1e-6)
  np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, rtol=1e-6)
  np.testing.assert_array_equal(one[0], one[3])
  (file,) = cache.iterdir()
  np.save(file, -one)
  np.testing.assert_array_equal(encoders[0](CAPTIONS), -one)  # read, not encoded again
