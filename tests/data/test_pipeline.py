"""Batch n is a function of (seed, n): after a resume, for any number of processes."""

import io
import tarfile

import chex
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from xe_retrieval import prepare
from xe_retrieval.data import decoding, pipeline, shapes, tokenization
from xe_retrieval.data.feed import pairs
from xe_retrieval.preparation import records


@pytest.fixture(scope="module")
def source(data_dir):
  return pipeline.Source("shapes/64", data_dir, "train")


@pytest.fixture(scope="module")
def tokenizer(source):
  return tokenization.train([c for captions in source.captions() for c in captions], 1000, 20)


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
  np.testing.assert_array_equal(np.sort(first), np.sort(source.column("image_id")))
  np.testing.assert_array_equal(np.sort(first), np.sort(second))
  assert (first != second).any()
  config.seed = 1
  assert (batches(source, tokenizer, config)[0]["image_id"] != ids[0]).any()


def test_images_match_their_captions(source, tokenizer, config):
  config.image.size = 64
  batch = batches(source, tokenizer, config)[0]
  scenes = dict(zip(source.column("image_id"), source.column("scene"), strict=True))
  captions = source.captions()
  records = list(source.column("image_id"))
  for row in range(16):
    image_id = batch["image_id"][row]
    np.testing.assert_array_equal(
      batch["image"][row], shapes.render(scenes[image_id].astype(np.int8))
    )
    own = [captions[r] for r, i in enumerate(records) if i == image_id]
    tokens = tokenizer([c for record in own for c in record])
    assert (batch["tokens"][row] == tokens).all(1).any()


def test_equal_captions_have_equal_ids(source):
  by_caption = {}
  for captions, ids in zip(source.captions(), source.column("text_ids"), strict=True):
    for caption, number in zip(captions, ids, strict=True):
      assert by_caption.setdefault(caption, number) == number
  assert len(set(by_caption.values())) == len(by_caption) < len(source)


def test_evaluation_keeps_the_short_last_batch(source):
  got = list(pipeline.image_batches(source, 64, pipeline.spans(64, 24)))
  assert [len(b) for b in got] == [24, 24, 16]
  scenes = source.column("scene").astype(np.int8)
  np.testing.assert_array_equal(np.concatenate(got), [shapes.render(s) for s in scenes])


def test_clear_errors(source, tokenizer, config, data_dir):
  with pytest.raises(ValueError, match="no split 'dev'; it has train, validation, test"):
    pipeline.Source("shapes/64", data_dir, "dev")
  with pytest.raises(ValueError, match=r"config\.data\.name.*'shape'"):
    pipeline.Source("shape", data_dir, "train")
  config.batch_size = 128
  with pytest.raises(ValueError, match=r"batch_size is 128.*only 64 images"):
    batches(source, tokenizer, config)


def test_tokenizer_is_reproducible_and_spells_unknown_words(source, tokenizer, tmp_path):
  again = tokenization.train([c for captions in source.captions() for c in captions], 1000, 20)
  words = ["a small red circle", "Sour cat!", "a " * 40]
  np.testing.assert_array_equal(tokenizer(words), again(words))
  ids = tokenizer(words)
  assert (ids[1] != 0).sum() > 5  # spelt letter by letter
  assert (ids[2] != 0).all()  # truncated at 20
  tokenizer.save(tmp_path)
  np.testing.assert_array_equal(tokenization.load(tmp_path, ConfigDict({"tokens": 20}))(words), ids)


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
  np.testing.assert_array_equal(tokenizer(captions), expected)  # from the cache


def test_crops_are_inside_the_image_and_of_every_size_place_and_aspect(source):
  encoded = [source.image(0)] * 2_000
  draws = pairs._hash(0, 0, np.arange(2_000))
  y, x, height, width = decoding.random_crops(encoded, draws).T
  assert min(y.min(), x.min()) == 0 and max((y + height).max(), (x + width).max()) == 64
  area, aspect = height * width / 64**2, width / height
  assert 0.19 < area.min() < 0.22 and 0.95 < area.max() <= 1.0 and 0.5 < area.mean() < 0.65
  assert 0.7 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.4
  np.testing.assert_array_equal(decoding.centres(encoded[:1]), [[0, 0, 64, 64]])


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("progressive", [False, True])
def test_sizes_are_read_from_the_header(kind, progressive):
  out = io.BytesIO()
  Image.new("RGB", (300, 20)).save(out, kind, progressive=progressive, icc_profile=b"x" * 70_000)
  np.testing.assert_array_equal(decoding.centres([out.getvalue()]), [[0, 140, 20, 20]])


def test_decoding_a_crop_equals_cropping_the_decoded_image():
  y, x = np.mgrid[:50, :80]
  image = Image.fromarray(np.stack([x * 3, y * 5, x + y], -1).astype(np.uint8))
  for kind, tolerance in (("JPEG", 6), ("PNG", 0)):
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 98, "subsampling": 0} if kind == "JPEG" else {}))
    part = decoding.decode(out.getvalue(), np.array([7, 21, 32, 32], np.int32), 32)
    exact = np.asarray(image)[7:39, 21:53].astype(int)
    assert np.abs(part - exact).max() <= tolerance


@pytest.mark.parametrize("size", [100, 52, 24, 10])  # decoded whole, at 1/2, 1/4 and 1/8
def test_decoding_at_reduced_size_shows_the_same(size):
  y, x = np.mgrid[:240, :320]
  image = Image.fromarray(np.stack([x * 0.8, y, 255 - x * 0.8], -1).astype(np.uint8))
  out = io.BytesIO()
  image.save(out, "JPEG", quality=95)
  part = decoding.decode(out.getvalue(), np.array([40, 60, 120, 110], np.int32), size)
  exact = image.resize((size, size), Image.Resampling.BOX, box=(60, 40, 170, 160))
  assert np.abs(part - np.asarray(exact, int)).max() <= 12


def test_a_broken_image_is_grey_and_the_run_goes_on(tmp_path, config, tokenizer):
  images = []
  for n in range(48):
    out = io.BytesIO()
    Image.new("RGB", (16, 16), (5 * n, 255 - 5 * n, 0)).save(out, "JPEG")
    images.append(out.getvalue())
  table = images[20].index(b"\xff\xc4")  # an invalid Huffman table, found only by decoding
  images[20] = images[20][:table] + b"\xff\xc4\x00\x13\x00" + b"\xff" * 16 + images[20][table:]
  with tarfile.open(tmp_path / "0.tar", "w") as tar:
    for n, image in enumerate(images):
      for name, content in ((f"{n:03d}.jpg", image), (f"{n:03d}.txt", b"a red circle")):
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
  options = records.Options(None, shares=(("train", 1.0),))
  prepare.prepare(prepare.webdataset([f"{tmp_path}/0.tar"], "broken"), tmp_path, options)
  source = pipeline.Source("captions/broken", str(tmp_path), "train")
  assert len(source) == 48
  config.steps = 3
  whole = batches(source, tokenizer, config)
  shown = np.concatenate([b["image"] for b in whole])
  grey = (np.abs(shown.astype(int) - 127) < 3).all((1, 2, 3))
  assert len(shown) == 48 and grey.sum() == 1
  chex.assert_trees_all_equal(batches(source, tokenizer, config, start=1), whole[1:])
  assert [len(b) for b in pipeline.image_batches(source, 16, pipeline.spans(48, 40))] == [40, 8]


def test_starting_late_reads_no_earlier_record(source, tokenizer, config, monkeypatch):
  config.steps = 10**9
  read, indices = source.records.read, []
  monkeypatch.setattr(source.records, "read", lambda rows: indices.extend(rows) or read(rows))
  (last,) = batches(source, tokenizer, config, start=10**9 - 1)
  assert last["image"].shape == (16, 16, 16, 3)
  np.testing.assert_array_equal(indices, pipeline.choice(64, config)(10**9 - 1)[0])
