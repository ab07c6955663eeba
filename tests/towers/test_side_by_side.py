"""Several frozen image towers side by side: cached, trained, exported, indexed and searched."""

import json
import pathlib
import shutil

import chex
import jax
import numpy as np
import pytest
from PIL import Image

import xe_retrieval
from tests.conftest import tiny
from tests.towers.conftest import REFERENCES
from xe_retrieval import export, index, main
from xe_retrieval import model as models
from xe_retrieval.data import decoding, pipeline, shapes
from xe_retrieval.search import searcher
from xe_retrieval.towers import pretrained, weight_files
from xe_retrieval.training import features

PREPROCESSOR = {"image_processor_type": "ViTImageProcessor", "resample": 3, "do_resize": True}
PREPROCESSOR |= {"size": {"height": 20, "width": 20}, "image_mean": [0.4] * 3}
PREPROCESSOR |= {"image_std": [0.3] * 3}


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
  """A ResNet, which takes what config.image says, and a DINOv2 with pixels of its own."""
  folder = tmp_path_factory.mktemp("towers")
  shutil.copytree(REFERENCES / "resnet_v15", folder / "resnet")
  shutil.copytree(REFERENCES / "dinov2", folder / "dinov2")
  (folder / "dinov2" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
  return str(folder / "resnet"), str(folder / "dinov2")


def configured(towers, data_dir, layers=()):
  config = tiny(data_dir)
  config.image.size = 32
  config.image.pretrained = ",".join(towers)
  config.image.layers, config.image.pooling = layers, "cls_mean"
  config.text.freeze = config.image.freeze = "all"
  return config


@pytest.fixture(scope="module")
def trained(towers, tmp_path_factory):
  """A workdir, and the names of the tables that each tower alone has made before."""
  data_dir = str(tmp_path_factory.mktemp("datasets"))
  for i, layers in enumerate([(), (1, 2)]):
    alone = configured(towers[i : i + 1], data_dir, layers)
    alone.steps = alone.image.warmup_steps = alone.text.warmup_steps = 1
    main.train(alone, tmp_path_factory.mktemp(f"alone{i}"), jax.devices()[:1])
  known = {p.name for p in (pathlib.Path(data_dir) / "features").glob("*image*.npy")}
  workdir = tmp_path_factory.mktemp("both")
  main.train(configured(towers, data_dir, ((), (1, 2))), workdir, jax.devices()[:1])
  after = {p.name for p in (pathlib.Path(data_dir) / "features").glob("*image*.npy")}
  return workdir, known, after


def photos(count=5):
  return [shapes.render(shapes.scene(0, "test", i)) for i in range(count)]


def test_each_tower_is_cached_as_if_it_was_alone(trained):
  _, known, after = trained
  assert len(known) == 4 and after == known  # train and validation, two towers: nothing new


def test_pixels_features_and_standardisation(trained):
  """What training saw, from the tables, is what embedding photos gives."""
  workdir, *_ = trained
  encoder = models.restore(workdir, "latest")
  view = decoding.View.of(encoder.config.image)
  assert view.spans == ((0, 32), (32, 20)) and view.shape == (52, 32, 3)
  source = pipeline.Source("shapes/64", encoder.config.data.dir, "train")
  table = features.of(encoder, source, ("image",))["image"]
  rows = np.asarray(table[np.arange(64)])
  width = encoder.model.image.tower.feature_width()
  assert rows.shape == (64, width)
  standard = encoder.variables["batch_stats"]["image"]["standard"]
  np.testing.assert_allclose(standard["mean"], rows.mean(0), rtol=1e-4, atol=1e-5)
  scaled = (rows - np.asarray(standard["mean"])) / np.asarray(standard["std"])
  varied = rows.std(0) > 1e-3
  assert varied.sum() > width // 4
  np.testing.assert_allclose(scaled[:, varied].std(0), 1, rtol=1e-3)
  images = [source.image(i) for i in range(8)]
  squares = np.stack([decoding.square(image, view=view) for image in images])
  embedded = encoder.embed_squares([squares], 8)
  np.testing.assert_allclose(embedded, encoder.project_images(rows[:8]), atol=1e-4)


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
  encoded = [decoding._png(Image.fromarray(photo)) for photo in photos(3)]
  out = np.full((3, *view.shape), 7, np.uint8)
  boxes = decoding.whole(encoded, view)
  assert decoding.decode_all([*encoded[:2], b"broken"], boxes, view, out) == 1
  for got, photo in zip(out[:2], encoded, strict=False):
    np.testing.assert_array_equal(got, decoding.square(photo, view=view))
    np.testing.assert_array_equal(got[32:, :20], decoding.square(photo, view=20))
    assert not got[32:, 20:].any()
  assert len(np.unique(out[2])) == 1


def test_exported_indexed_and_searched(trained, tmp_path):
  workdir, *_ = trained
  model = xe_retrieval.load(workdir, "latest")
  out = export.export(workdir, tmp_path / "exported", "latest")
  assert (out / "image" / "towers_1" / "preprocessor_config.json").exists()
  again = xe_retrieval.load(out)
  vectors = model.embed_images(photos())
  np.testing.assert_allclose(again.embed_images(photos()), vectors, atol=1e-5)
  assert again.fingerprint() == model.fingerprint()
  assert "towers_1" in (out / "README.md").read_text()

  index.index(out, ["shapes/64:test"], tmp_path / "index", data_dir=model.config.data.dir)
  search = searcher.open_index(tmp_path / "index")
  found = next(search.answers(["a red circle"], top=3, threshold=-1.0))["results"]
  assert len(found) == 3 and np.isfinite([hit["score"] for hit in found]).all()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"layers": (9, 10)}, r"expected a tuple for each of the 2 towers"),
    ({"layers": ((), (9,))}, r"config.image.layers=\(9,\): expected numbers from 1 to"),
    ({"revision": "v1"}, r"config.image.revision='v1': expected one for each of the 2 towers"),
    ({"freeze": "none"}, "side by side can only be 'all'"),
  ],
)
def test_what_several_towers_cannot_be(towers, data_dir, change, message):
  config = configured(towers, data_dir)
  config.image.update(change)
  with pytest.raises(ValueError, match=message):
    main.train(config, "nowhere")


def test_a_single_tower_in_a_tuple_is_standardised(towers, data_dir):
  config = configured(towers, data_dir)
  with config.ignore_type():
    config.image.pretrained = towers[1:]
  config = pretrained.configure(config)
  assert list(config.image.towers) == ["towers_0"]
  config.data.augment = "random_resized_crop"
  with pytest.raises(ValueError, match="side by side need config.data.augment='none'"):
    pretrained.configure(config)
  config.text.pretrained = "one,other"
  with pytest.raises(ValueError, match="names several towers, which only config.image.pretrained"):
    pretrained.configure(config)
