"""Several frozen towers side by side: cached, trained, exported, indexed and searched."""

import json
import pathlib
import shutil

import chex
import cv2
import jax
import numpy as np
import pytest

import xe_retrieval
from tests.conftest import tiny
from tests.towers.conftest import REFERENCES
from xe_retrieval import config as config_lib
from xe_retrieval import export, index, main
from xe_retrieval import model as models
from xe_retrieval.data import decoding, pipeline, shapes, tokenization
from xe_retrieval.search import searcher
from xe_retrieval.towers import bank as banks
from xe_retrieval.towers import pretrained, weight_files
from xe_retrieval.training import features

PREPROCESSOR = {"image_processor_type": "ViTImageProcessor", "resample": 3, "do_resize": True}
PREPROCESSOR |= {"size": {"height": 20, "width": 20}, "image_mean": [0.4] * 3}
PREPROCESSOR |= {"image_std": [0.3] * 3}


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
  """A ResNet, which takes what config.image says, and a DINOv2 with pixels of its own; a BERT with
  word pieces and the text tower of a CLIP with its BPE."""
  folder = tmp_path_factory.mktemp("towers")
  shutil.copytree(REFERENCES / "bert", folder / "bert")
  words = [shapes.caption(0, "train", i) for i in range(20)]
  tokenization.train(words, 40, 12).save(folder / "bert")
  shutil.copytree(REFERENCES / "resnet_v15", folder / "resnet")
  shutil.copytree(REFERENCES / "dinov2", folder / "dinov2")
  (folder / "dinov2" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
  return {
    "text": (str(folder / "bert"), str(REFERENCES / "clip")),
    "image": (str(folder / "resnet"), str(folder / "dinov2")),
  }


def configured(towers, data_dir, layers=(), which=slice(None)):
  config = tiny(data_dir)
  config.image.size, config.text.tokens = 32, 12
  for encoder, sources in towers.items():
    config[encoder].pretrained = ",".join(sources[which])
  config.image.layers, config.image.pooling = layers, "cls_mean"
  config.text.freeze = config.image.freeze = "all"
  return config


@pytest.fixture(scope="module")
def trained(towers, tmp_path_factory):
  """A workdir, and the names of the tables that each tower alone has made before."""
  data_dir = str(tmp_path_factory.mktemp("datasets"))
  for i, layers in enumerate([(), (1, 2)]):
    alone = configured(towers, data_dir, layers, slice(i, i + 1))
    alone.steps = alone.image.warmup_steps = alone.text.warmup_steps = 1
    main.train(alone, tmp_path_factory.mktemp(f"alone{i}"), jax.devices()[:1])
  known = {p.name for p in (pathlib.Path(data_dir) / "features").glob("*.npy")}
  workdir = tmp_path_factory.mktemp("both")
  main.train(configured(towers, data_dir, ((), (1, 2))), workdir, jax.devices()[:1])
  after = {p.name for p in (pathlib.Path(data_dir) / "features").glob("*.npy")}
  return workdir, known, after


def photos(count=5):
  return [shapes.render(shapes.scene(0, "test", i)) for i in range(count)]


def test_each_tower_is_cached_as_if_it_was_alone(trained):
  _, known, after = trained
  assert len(known) == 8 and after == known  # train and validation, four towers: nothing new


def test_inputs_features_and_standardisation(trained):
  """What training saw, from the tables, is what embedding photos and captions gives."""
  workdir, *_ = trained
  encoder = models.restore(workdir, "latest")
  view = decoding.View.of(encoder.config.image)
  assert view.spans == ((0, 32), (32, 20)) and view.shape == (52, 32, 3)
  assert tokenization.spans(encoder.config.text) == [(0, 12), (12, 24)]
  source = pipeline.Source("shapes/64", encoder.config.data.dir, "train")
  images = [source.image(i) for i in range(8)]
  squares = np.stack([decoding.square(image, view=view) for image in images])
  embedded = {
    "text": encoder.embed_text(list(source.captions().flat[:8])),
    "image": encoder.embed_squares([squares], 8),
  }
  project = {"text": encoder.project_text, "image": encoder.project_images}
  for name, table in features.of(encoder, source).items():
    rows = np.asarray(table[np.arange(64)])
    width = getattr(encoder.model, name).tower.feature_width()
    assert rows.shape == (64, width)
    standard = encoder.variables["batch_stats"][name]["standard"]
    np.testing.assert_allclose(standard["mean"], rows.mean(0), rtol=1e-4, atol=1e-5)
    scaled = (rows - np.asarray(standard["mean"])) / np.asarray(standard["std"])
    varied = rows.std(0) > 1e-3
    assert varied.sum() > width // 4
    np.testing.assert_allclose(scaled[:, varied].std(0), 1, rtol=1e-3)
    np.testing.assert_allclose(embedded[name], project[name](rows[:8]), atol=1e-4)


def test_each_text_tower_reads_words_in_its_own_way(trained, towers):
  encoder = models.restore(trained[0], "latest")
  words = ["a red circle", "two blue squares beside a star"]
  fields = config_lib.towers(encoder.config.text).values()
  alone = [tokenization.of_tower(*x)(words) for x in zip(towers["text"], fields, strict=True)]
  np.testing.assert_array_equal(encoder.tokenizer(words), np.concatenate(alone, axis=1))


def test_familiarity_hears_every_text_tower(trained, tmp_path):
  """However large the features of one are, the bank sees them over their deviation."""
  encoder = models.restore(trained[0], "latest")
  source = pipeline.Source("shapes/64", encoder.config.data.dir, "train")
  table = features.of(encoder, source)
  bank = banks.make(encoder, source, table)
  rows = np.asarray(table["text"][np.arange(64)])
  scaled = rows / np.asarray(encoder.variables["batch_stats"]["text"]["standard"]["std"])
  scaled -= scaled.mean(0)
  scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
  expected = np.sort(scaled @ scaled.T, axis=1)[:, -banks.NEAREST :].mean(1)
  np.testing.assert_allclose(bank.familiarity(rows), expected, atol=2e-3)  # stored as halves
  bank.write(tmp_path / banks.NAME)
  again = banks.read(tmp_path, encoder.fingerprint())
  np.testing.assert_array_equal(again.familiarity(rows), bank.familiarity(rows))


def test_resumes_with_what_it_knows_of_its_towers(trained, towers, tmp_path, monkeypatch):
  """Neither weights nor standardisation come again: both are in the checkpoint."""
  workdir = shutil.copytree(trained[0], tmp_path / "both")
  config = configured(towers, models.restore(workdir, "latest").config.data.dir, ((), (1, 2)))

  def never(*_):
    raise AssertionError("not when resuming")

  monkeypatch.setattr(weight_files, "locate", never)
  monkeypatch.setattr(features, "standardised", never)
  state = main.train(config, workdir, jax.devices()[:1])
  standard = models.restore(trained[0], "latest").variables["batch_stats"]["image"]["standard"]
  chex.assert_trees_all_equal(state.batch_stats["image"]["standard"], standard)
  config.data.augment = "random_resized_crop"
  with pytest.raises(ValueError, match="side by side need config.data.augment='none'"):
    main.train(config, workdir, jax.devices()[:1])
  config.data.augment, config.image.layers = "none", ((), (1,))
  with pytest.raises(AssertionError, match="not when resuming"):  # other towers than it knows
    main.train(config, workdir, jax.devices()[:1])


def test_decoding_leaves_nothing_of_what_was_in_the_array_before():
  view = decoding.Views((decoding.View(32), decoding.View(20), decoding.View(32)))
  encoded = [cv2.imencode(".png", photo[..., ::-1])[1].tobytes() for photo in photos(3)]
  out = np.full((3, *view.shape), 7, np.uint8)
  boxes = decoding.whole(encoded, view)
  assert decoding.decode_all([*encoded[:2], b"broken"], boxes, view, out) == 1
  for got, photo in zip(out[:2], encoded, strict=False):
    np.testing.assert_array_equal(got, decoding.square(photo, view=view))
    array = cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_COLOR_RGB)
    np.testing.assert_array_equal(got, decoding.square(array, view=view))
    np.testing.assert_array_equal(got[32:, :20], decoding.square(photo, view=20))
    assert not got[32:, 20:].any()
  assert len(np.unique(out[2])) == 1


def test_exported_indexed_and_searched(trained, tmp_path):
  workdir, *_ = trained
  model = xe_retrieval.load(workdir, "latest")
  out = export.export(workdir, tmp_path / "exported", "latest")
  assert (out / "image" / "towers_1" / "preprocessor_config.json").exists()
  again = xe_retrieval.load(out)
  words = ["a red circle", "two blue squares"]
  np.testing.assert_allclose(again.embed_text(words), model.embed_text(words), atol=1e-5)
  vectors = model.embed_images(photos())
  np.testing.assert_allclose(again.embed_images(photos()), vectors, atol=1e-5)
  assert again.fingerprint() == model.fingerprint()
  readme = (out / "README.md").read_text()
  assert "image/towers_1" in readme and 'CLIPTextModel.from_pretrained("text/towers_1")' in readme
  function = jax.export.deserialize((out / "text.jax").read_bytes()).call
  np.testing.assert_allclose(function(model.tokenizer(words)), model.embed_text(words), atol=1e-4)

  index.index(out, ["shapes/64:test"], tmp_path / "index", data_dir=model.config.data.dir)
  search = searcher.open_index(tmp_path / "index")
  found = next(search.answers(["a red circle"], top=3, threshold=-1.0))["results"]
  assert len(found) == 3 and np.isfinite([hit["score"] for hit in found]).all()


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("image.layers", (9, 10), r"expected a tuple for each of the 2 towers"),
    ("image.layers", ((), (9,)), r"config.image.layers=\(9,\): expected numbers from 1 to"),
    ("image.revision", "v1", r"image.revision='v1': expected one for each of the 2 towers"),
    ("text.revision", "v1", r"text.revision='v1': expected one for each of the 2 towers"),
    ("image.freeze", "none", "config.image.freeze='none': .* side by side can only be 'all'"),
    ("text.freeze", "1", "config.text.freeze='1': .* side by side can only be 'all'"),
    ("text.tokens", 13, "text.tokens=13, but .*bert knows 12 positions"),
  ],
)
def test_what_several_towers_cannot_be(towers, data_dir, field, value, message):
  config = configured(towers, data_dir)
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=message):
    main.train(config, "nowhere")


def test_a_single_tower_in_a_tuple_is_standardised(towers, data_dir):
  config = configured(towers, data_dir)
  with config.ignore_type():
    config.image.pretrained = towers["image"][1:]
  config = pretrained.configure(config)
  assert list(config.image.towers) == ["towers_0"]
  config.data.augment = "random_resized_crop"
  with pytest.raises(ValueError, match="side by side need config.data.augment='none'"):
    pretrained.configure(config)
