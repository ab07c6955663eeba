"""Batch n is a function of (seed, n): after a resume, for any number of processes."""

import chex
import numpy as np
import pytest

from xe_retrieval.data import pipeline, shapes, text


@pytest.fixture(scope="module")
def source(data_dir):
  return pipeline.Source("shapes/64", data_dir, "train")


@pytest.fixture(scope="module")
def tokenizer(source):
  return text.train([c for captions in source.captions() for c in captions], 1000, 20)


def batches(source, tokenizer, config, **kwargs):
  return list(pipeline.train_batches(source, tokenizer, config, **kwargs))


def test_shapes_and_types(source, tokenizer, config):
  batch = batches(source, tokenizer, config)[0]
  chex.assert_shape(batch["image"], (16, 16, 16, 3))
  chex.assert_shape(batch["tokens"], (16, 20))
  chex.assert_type([batch["image"], batch["tokens"]], [np.uint8, np.int32])
  chex.assert_type([batch["text_id"], batch["image_id"]], np.int32)


@pytest.mark.parametrize("augment", ["none", "random_resized_crop"])
def test_starting_later_gives_the_same_batches(source, tokenizer, config, augment):
  config.data.augment = augment
  whole = batches(source, tokenizer, config)
  chex.assert_trees_all_equal(batches(source, tokenizer, config, start=2), whole[2:])


def test_two_processes_share_the_global_batch(source, tokenizer, config):
  whole = batches(source, tokenizer, config)
  parts = [batches(source, tokenizer, config, process=p, processes=2) for p in range(2)]
  for n, batch in enumerate(whole):
    together = {k: np.concatenate([part[n][k] for part in parts]) for k in batch}
    chex.assert_trees_all_equal(together, batch)


def test_an_epoch_shows_every_image_once_and_the_next_in_another_order(source, tokenizer, config):
  config.steps = 8
  ids = [b["image_id"] for b in batches(source, tokenizer, config)]
  first, second = np.concatenate(ids[:4]), np.concatenate(ids[4:])
  np.testing.assert_array_equal(np.sort(first), np.sort(source.columns("image_id")["image_id"]))
  np.testing.assert_array_equal(np.sort(first), np.sort(second))
  assert (first != second).any()
  config.seed = 1
  assert (batches(source, tokenizer, config)[0]["image_id"] != ids[0]).any()


def test_pictures_match_their_captions(source, tokenizer, config):
  config.image.size = 64
  batch = batches(source, tokenizer, config)[0]
  scenes = {i: s for i, s in zip(*source.columns("image_id", "scene").values(), strict=True)}
  captions = source.captions()
  records = list(source.columns("image_id")["image_id"])
  for row in range(16):
    image_id = batch["image_id"][row]
    np.testing.assert_array_equal(
      batch["image"][row], shapes.picture(scenes[image_id].astype(np.int8))
    )
    own = [captions[r] for r, i in enumerate(records) if i == image_id]
    tokens = tokenizer([c for record in own for c in record])
    assert (batch["tokens"][row] == tokens).all(1).any()


def test_equal_captions_have_equal_ids(source):
  columns = source.columns("captions", "text_ids")
  by_caption = {}
  for captions, ids in zip(columns["captions"], columns["text_ids"], strict=True):
    for caption, number in zip(captions, ids, strict=True):
      assert by_caption.setdefault(caption, number) == number
  assert len(set(by_caption.values())) == len(by_caption) < len(source)


def test_evaluation_keeps_the_short_last_batch(source):
  got = list(pipeline.image_batches(source, 64, batch_size=24))
  assert [len(b) for b in got] == [24, 24, 16]
  scenes = np.stack(source.columns("scene")["scene"]).astype(np.int8)
  np.testing.assert_array_equal(np.concatenate(got), [shapes.picture(s) for s in scenes])


def test_clear_errors(source, tokenizer, config, data_dir):
  with pytest.raises(ValueError, match="no split 'dev'; it has train, validation, test"):
    pipeline.Source("shapes/64", data_dir, "dev")
  with pytest.raises(ValueError, match=r"config\.data\.name.*'shape'"):
    pipeline.Source("shape", data_dir, "train")
  config.batch_size = 128
  with pytest.raises(ValueError, match=r"batch_size is 128.*only 64 images"):
    batches(source, tokenizer, config)


def test_tokenizer_is_reproducible_and_spells_unknown_words(source, tokenizer, tmp_path):
  again = text.train([c for captions in source.captions() for c in captions], 1000, 20)
  words = ["a small red circle", "Sour cat!", "a " * 40]
  np.testing.assert_array_equal(tokenizer(words), again(words))
  ids = tokenizer(words)
  assert (ids[1] != 0).sum() > 5  # letter by letter
  assert (ids[2] != 0).all()  # cut at 20
  tokenizer.save(tmp_path)
  np.testing.assert_array_equal(text.load(tmp_path, 20)(words), ids)


def test_tokens_are_those_of_the_library(tokenizer, tmp_path):
  import transformers

  tokenizer.save(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  random = np.random.default_rng(0)
  letters = list("abcé ñ  ,.!'-#\t\n\u00a0\u3000犬猫Ωß\u0301[]0123456789") + [
    "[MASK]",
    "red",
    "[CLS]",
  ]
  captions = ["", " ", "a  b ", "can't", "a small red circle"]
  captions += ["".join(random.choice(letters, random.integers(60))) for _ in range(500)]
  expected = theirs(captions, padding="max_length", truncation=True, max_length=20)["input_ids"]
  np.testing.assert_array_equal(tokenizer(captions), expected)
  np.testing.assert_array_equal(tokenizer(captions), expected)  # from memory
