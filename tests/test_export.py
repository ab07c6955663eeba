"""Exporting a model to Hugging Face and jax.export, reading it back, and the Python interface."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest
from PIL import ExifTags, Image
from safetensors.numpy import load_file, save_file

import xe_retrieval
from xe_retrieval import config as config_lib
from xe_retrieval import export
from xe_retrieval import model as models
from xe_retrieval.data import decoding, mesh, tokenization
from xe_retrieval.data.cpu_tensorflow import tf
from xe_retrieval.towers import dual_encoder, pretrained
from xe_retrieval.training import objective, optimizers, step
from xe_retrieval.training.checkpoints import Checkpoints

REFERENCES = pathlib.Path(__file__).parent / "towers" / "references"
CAPTIONS = ["a red circle", "two blue squares above it", "b"]


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
  """workdirs(config) -> a workdir as training leaves it; weights not pretrained are random."""

  def make(config):
    workdir = tmp_path_factory.mktemp("workdir")
    tokenizer = tokenization.train(CAPTIONS, 40, config.text.tokens)
    tokenizer.save(workdir / "tokenizer")
    config = pretrained.configure(config)
    (workdir / "config.json").write_text(config_lib.to_json(config))
    model = dual_encoder.from_config(config)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: dual_encoder.init(config, model))
    variables = jax.tree.map(
      lambda x: np.abs(random.normal(0, 0.3, x.shape)).astype(x.dtype), shapes
    )
    variables = pretrained.load(config, variables)
    optimizer = optimizers.make(config, variables["params"] | objective.parameters(config))
    checkpoints = Checkpoints(workdir)
    checkpoints.save(step.init(config, variables, optimizer, mesh.make()))
    checkpoints.close()
    return workdir

  return make


@pytest.fixture
def published(config):
  """A config of the two tiny reference towers."""
  config.text.pretrained = str(REFERENCES / "bert")
  config.image.pretrained = str(REFERENCES / "resnet_v15")
  config.text.tokens, config.image.size = 12, 40
  return config


@pytest.fixture
def images():
  random = np.random.default_rng(1)
  return [random.integers(0, 256, shape, dtype=np.uint8) for shape in [(40, 40, 3), (50, 90, 3)]]


def square(image, size):
  """The crop that evaluation takes of an image."""
  data = tf.io.encode_png(image).numpy()
  return decoding.decode(data, decoding.centres([data])[0], size)


def test_export_returns_the_pretrained_weights_and_configs(workdirs, published, tmp_path):
  out = export.export(workdirs(published), tmp_path / "out")
  for encoder, name in (("text", "bert"), ("image", "resnet_v15")):
    stored = load_file(REFERENCES / name / "model.safetensors")
    chex.assert_trees_all_equal(load_file(out / encoder / "model.safetensors"), stored)
    ours, theirs = (
      json.loads((path / "config.json").read_text()) for path in (out / encoder, REFERENCES / name)
    )
    differences = {k for k in ours | theirs if ours.get(k, ...) != theirs.get(k, ...)}
    assert differences <= {"dtype", "hidden_dropout_prob", "attention_probs_dropout_prob"}
  assert json.loads((out / "image" / "preprocessor_config.json").read_text())["image_mean"] == list(
    published.image.mean
  )


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_transformers_gives_the_same_embeddings(workdirs, published, tmp_path, pooling):
  published.text.pooling = pooling
  published.text.trunk = 5 if pooling == "cls" else 0
  workdir = workdirs(published)
  out = export.export(workdir, tmp_path / "out")
  images = np.random.default_rng(1).integers(0, 256, (2, 40, 40, 3), dtype=np.uint8)
  np.save(tmp_path / "images.npy", images)
  (tmp_path / "captions.json").write_text(json.dumps(CAPTIONS))
  script = pathlib.Path(__file__).with_name("torch_embeddings.py")
  command = [sys.executable, script, out, pooling, tmp_path]
  subprocess.run(command, check=True, capture_output=True)
  theirs = np.load(tmp_path / "embeddings.npz")
  model = xe_retrieval.load(workdir)
  np.testing.assert_allclose(model.embed_text(CAPTIONS), theirs["text"], atol=1e-5)
  np.testing.assert_allclose(model.embed_images(list(images)), theirs["image"], atol=1e-5)


def test_exported_directory_gives_the_same_embeddings(config, workdirs, images, tmp_path):
  config.image.trunk = 6
  workdir = workdirs(config)  # a stem that transformers does not know
  out = export.export(workdir, tmp_path / "out")
  model, again = xe_retrieval.load(workdir), xe_retrieval.load(out)
  expected = model.embed_text(CAPTIONS)
  chex.assert_shape(expected, (3, config.embedding_dim))
  np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-5)
  np.testing.assert_allclose(again.embed_text(CAPTIONS), expected, atol=1e-6)
  expected_images = model.embed_images(images)
  np.testing.assert_allclose(again.embed_images(images), expected_images, atol=1e-6)

  text_function, image_function = (
    jax.export.deserialize((out / f"{name}.jax").read_bytes()).call for name in ("text", "image")
  )
  np.testing.assert_allclose(text_function(model.tokenizer(CAPTIONS)), expected, atol=1e-6)
  squares = np.stack([square(image, config.image.size) for image in images])
  np.testing.assert_allclose(image_function(squares), expected_images, atol=1e-6)

  with pytest.raises(ValueError, match="is not empty; choose a new directory"):
    export.export(workdir, out)
  projections = load_file(out / "projections.safetensors")
  assert projections["image.trunk_in.weight"].shape == (6, 16)
  del projections["image.trunk_in.weight"]
  save_file(projections, out / "projections.safetensors")
  with pytest.raises(ValueError, match=r"image.trunk_in.weight should be \(6, 16\), is None"):
    xe_retrieval.load(out)
  (tmp_path / "out" / "image" / "model.safetensors").unlink()
  with pytest.raises(ValueError, match="image holds no weights"):
    xe_retrieval.load(out)


def test_a_clip_trained_here_is_one_for_others(config, workdirs, images, tmp_path):
  """Its dual/ has the scale that the loss has learned, whatever it was at the start."""
  config.text.family = config.image.family = "clip"
  config.image.update(size=32, patch=16, blocks=1, width=16, heads=2, mlp=16)
  config.scale, config.scale_learned = 30.0, True
  with config.unlocked():
    config.text.eos = 3  # as training finds it in its tokenizer
  workdir = workdirs(config)
  written = workdir / "config.json"
  start = config_lib.from_json(written.read_text())
  start.scale = 20.0
  written.write_text(config_lib.to_json(start))
  out = export.export(workdir, tmp_path / "out")
  model, stock = xe_retrieval.load(workdir), xe_retrieval.load(out / "dual")
  assert stock.config.scale == pytest.approx(30.0)
  np.testing.assert_allclose(stock.embed_text(CAPTIONS), model.embed_text(CAPTIONS), atol=1e-6)
  squares = [square(image, 32) for image in images]
  expected = model.embed_images(squares)
  np.testing.assert_allclose(stock.embed_images(squares), expected, atol=1e-6)


def test_images_in_any_form(config, workdirs, images, tmp_path, monkeypatch):
  model = xe_retrieval.load(workdirs(config))
  Image.fromarray(images[1]).save(tmp_path / "a.png")
  Image.fromarray(images[1]).save(tmp_path / "a.bmp")
  Image.fromarray(images[1]).save(tmp_path / "a.jpg", quality=95)
  pil = Image.fromarray(images[1]).convert("RGBA")
  forms = [images[1], pil, str(tmp_path / "a.png"), tmp_path / "a.bmp", tmp_path / "a.jpg"]
  found = model.embed_images(forms)
  for same in found[1:4]:
    np.testing.assert_allclose(same, found[0], atol=1e-6)
  np.testing.assert_allclose(found[4], found[0], atol=0.05)  # JPEG is lossy
  turned = Image.fromarray(np.rot90(images[1]))
  exif = turned.getexif()
  exif[ExifTags.Base.Orientation] = 6  # viewers rotate it clockwise
  turned.save(tmp_path / "turned.png", exif=exif)
  np.testing.assert_allclose(model.embed_images([tmp_path / "turned.png"])[0], found[0], atol=1e-6)

  monkeypatch.setattr(models, "BATCH", 2)  # several batches, the last one incomplete
  np.testing.assert_allclose(model.embed_images(forms), found, atol=1e-6)
  one_by_one = [model.embed_text([caption])[0] for caption in CAPTIONS]
  np.testing.assert_allclose(model.embed_text(CAPTIONS), one_by_one, atol=1e-6)
  assert model.embed_text([]).shape == (0, config.embedding_dim)

  (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:900])
  (tmp_path / "broken.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:300])
  (tmp_path / "words.txt").write_text("words")
  for wrong, message in [
    (tmp_path / "none.jpg", "none.jpg' is not a readable image"),
    (tmp_path / "words.txt", "words.txt' is not a readable image"),
    (tmp_path / "broken.png", "broken.png' is not a readable image"),
    (tmp_path / "broken.jpg", "broken.jpg' is not a readable image"),
    (np.zeros((4, 4, 3)), r"images\[1\] is float64 \(4, 4, 3\); expected uint8"),
  ]:
    with pytest.raises(ValueError, match=message):
      model.embed_images([images[0], wrong])
  with pytest.raises(TypeError, match=r"images\[0\] is int; expected a path"):
    model.embed_images([3])
  with pytest.raises(
    TypeError, match=r"captions should be a list; for a single one, pass \[caption\]"
  ):
    model.embed_text("a red circle")
  with pytest.raises(TypeError, match=r"captions\[1\] is int; expected a string"):
    model.embed_text(["a", 2])


def test_onnx_runs_without_jax(workdirs, published, tmp_path):
  """Any batch size; `export` itself compares the outputs with JAX's."""
  pytest.importorskip("jax2onnx")
  import onnxruntime

  published.image.pretrained = str(REFERENCES / "dinov2")
  workdir = workdirs(published)
  out = export.export(workdir, tmp_path / "out", onnx=True)
  model = xe_retrieval.load(workdir)
  session = onnxruntime.InferenceSession(out / "text.onnx")
  found = session.run(None, {"text": model.tokenizer(CAPTIONS)})[0]
  np.testing.assert_allclose(found, model.embed_text(CAPTIONS), atol=1e-4)
  session = onnxruntime.InferenceSession(out / "image.onnx")
  pixels = np.random.default_rng(1).integers(0, 256, (2, 40, 40, 3), dtype=np.uint8)
  found = session.run(None, {"image": pixels})[0]
  np.testing.assert_allclose(found, model.embed_images(list(pixels)), atol=1e-4)


def test_onnx_without_its_packages(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"--onnx needs packages: pip install .*\[onnx\]"):
    export.export(tmp_path / "run", tmp_path / "out", onnx=True)


def test_not_a_model(tmp_path):
  with pytest.raises(ValueError, match="is no workdir of a training run"):
    xe_retrieval.load(tmp_path)
