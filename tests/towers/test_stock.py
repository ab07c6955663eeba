"""A Hugging Face CLIP or SigLIP directory as it is, preprocessing and tokenizer included."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import xe_retrieval
from configs import clip
from tests.towers.conftest import REFERENCES
from tests.towers.make_captions import CAPTIONS
from xe_retrieval import evaluate, index, main
from xe_retrieval import model as models
from xe_retrieval.data import decoding
from xe_retrieval.search import searcher
from xe_retrieval.towers import dual_encoder, export_format, pretrained

NAMES = ["clip", "siglip"]


@pytest.fixture(scope="module", params=NAMES)
def stock(request):
  """(directory, the features that transformers computed, our model)."""
  folder = REFERENCES / request.param
  return folder, np.load(folder / "outputs.npz"), xe_retrieval.load(folder)


def test_embeddings_are_those_of_transformers(stock):
  folder, theirs, model = stock
  images = [theirs[f"image_{i}"] for i in range(3)]
  np.testing.assert_allclose(model.embed_text(CAPTIONS), theirs["text"], atol=1e-4)
  found = model.embed_images([*images, folder / "photo.jpg"])
  np.testing.assert_allclose(found, theirs["image"], atol=1e-4)
  assert model.config.scale == pytest.approx(np.exp(3.0))


def test_an_export_is_the_directory_again(stock, tmp_path):
  """Tensor for tensor, and as a model: dual/ alone, and the two towers with their projections."""
  folder, theirs, model = stock
  encoder = model._encoder(4)
  export_format.write(encoder, tmp_path / "out")
  stored = load_file(folder / "model.safetensors")
  found = load_file(tmp_path / "out" / "dual" / "model.safetensors")
  chex.assert_trees_all_close(found, stored, rtol=1e-6)
  for path in (tmp_path / "out", tmp_path / "out" / "dual"):
    again = xe_retrieval.load(path)
    chex.assert_trees_all_equal(again.variables["params"], model.variables["params"])
    np.testing.assert_array_equal(again.tokenizer(CAPTIONS), model.tokenizer(CAPTIONS))
    assert decoding.View.of(again.config.image) == decoding.View.of(model.config.image)


def test_a_workdir_for_evaluation(stock, tmp_path):
  """evaluate --pretrained: a workdir of no steps, from which the model is loaded as it is."""
  folder, _, model = stock
  workdir = evaluate.adopt(folder, tmp_path / "run", "shapes/64", str(tmp_path))
  assert evaluate.adopt(folder, workdir, "shapes/64", str(tmp_path)) == workdir
  again = models.restore(workdir)
  assert again.config.data.name == "shapes/64" and again.step == 0
  assert again.fingerprint() == model.fingerprint()
  with pytest.raises(ValueError, match=r"is of another model or data set \(config.data.name"):
    evaluate.adopt(folder, workdir, "shapes/128", str(tmp_path))
  with pytest.raises(ValueError, match="needs --dataset=…, the data to evaluate it on"):
    evaluate.adopt(folder, workdir, "")


def test_step_0_of_training_is_the_pretrained_model(stock, tiny):
  """config.pretrained: towers and projections of the model, with trainable or frozen parts."""
  folder, _, model = stock
  config = tiny(**{"text.freeze": "1", "image.freeze": "1"})
  with config.unlocked():
    config.update(pretrained=str(folder), scale=20.0)
    config.text.tokens = 14
  config = pretrained.configure(config)
  assert config.scale == 20 and config.embedding_dim == model.config.embedding_dim
  built = dual_encoder.from_config(config)
  shapes = jax.eval_shape(lambda: dual_encoder.init(config, built))
  variables = pretrained.load(config, shapes)
  chex.assert_trees_all_equal(variables["params"], model.variables["params"])

  tokens = model.tokenizer(CAPTIONS[:2])
  pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), np.uint8)
  mask = dual_encoder.frozen(variables["params"], config)

  def gradients(config):
    built = dual_encoder.from_config(config)

    def loss(params):
      text, image = built.apply({"params": params}, tokens, pixels, train=True)
      return jnp.sum(text * image)

    return jax.jit(jax.grad(loss))(variables["params"])

  config.text.dropout = 0.0
  grads = gradients(config)

  def check(path, frozen, grad):
    if "key" in jax.tree_util.keystr(path[:-1]) and path[-1].key == "bias":
      return  # shifts all scores of a query alike: its gradient is zero anyway
    if "qkv" not in jax.tree_util.keystr(path):
      assert frozen == (not np.any(grad)), jax.tree_util.keystr(path)

  jax.tree_util.tree_map_with_path(check, mask, grads)
  config.remat = True
  chex.assert_trees_all_close(gradients(config), grads, rtol=1e-3, atol=1e-3)


def test_adapting_starts_as_the_pretrained_model(stock, data_dir, tmp_path):
  """configs/clip.py: features cached, projections trained, all tokens that the model knows."""
  folder, theirs, model = stock
  config = clip.get_config()
  config.pretrained, config.steps = str(folder), 2
  config.data.name, config.data.dir = "shapes/64", data_dir
  config.eval_every = config.checkpoint_every = 2
  for tower in (config.text, config.image):
    tower.warmup_steps = 0
  config.batch_size = 80
  with pytest.raises(ValueError, match="batch_size is 80, but the train split .* only 64 images"):
    main.train(config, tmp_path / "none")
  config.batch_size, trained = 16, {}
  for rate in (0.0, 1e-3):
    config.text.learning_rate = config.image.learning_rate = rate
    main.train(config, tmp_path / f"{rate}")
    trained[rate] = xe_retrieval.load(tmp_path / f"{rate}")
  for adapted in trained.values():
    assert adapted.config.text.tokens == model.config.text.tokens
    assert adapted.config.scale == pytest.approx(np.exp(3.0))
    for encoder in ("text", "image"):
      towers = (m.variables["params"][encoder]["tower"] for m in (adapted, model))
      chex.assert_trees_all_equal(*towers)
  np.testing.assert_allclose(trained[0.0].embed_text(CAPTIONS), theirs["text"], atol=1e-4)
  moved = np.abs(trained[1e-3].embed_text(CAPTIONS) - theirs["text"]).max()
  assert moved > 1e-3
  bank = trained[1e-3].scoring.bank
  assert len(bank.captions) == 64 and bank.images.shape == (64, model.config.embedding_dim)


def test_a_stock_model_is_indexed_and_searched(stock, tmp_path):
  folder, _, model = stock
  photos = tmp_path / "photos"
  photos.mkdir()
  for i in range(4):
    colours = np.random.default_rng(i).integers(0, 256, (1, 1, 3), np.uint8)
    Image.fromarray(np.tile(colours, (30, 40, 1))).save(photos / f"{i}.png")
  index.index(str(folder), [str(photos)], str(tmp_path / "index"))
  search = searcher.open_index(str(tmp_path / "index"))
  with pytest.raises(ValueError, match=r"not evaluated: .* --pretrained=.* --dataset=… writes a"):
    next(search.answers(CAPTIONS[:1]))
  found = next(search.answers(CAPTIONS[:1], top=4, threshold=-1.0))["results"]
  files = [photos / hit["image"] for hit in found]
  expected = (model.embed_text(CAPTIONS[:1]) @ model.embed_images(files).T)[0]
  np.testing.assert_allclose([hit["score"] for hit in found], expected, atol=1e-4)
  assert list(expected) == sorted(expected, reverse=True)


def test_a_view_that_is_larger_than_the_photo_is_black_around_it():
  view = decoding.View(size=30, resize="shortest", shortest=20, resample="bicubic")
  found = decoding.square(np.full((20, 40, 3), 200, np.uint8), view=view)
  assert found.shape == (30, 30, 3)
  assert (found[5:25] == 200).all() and not found[:5].any() and not found[25:].any()


@pytest.mark.parametrize(
  "file, change, message",
  [
    ("preprocessor_config.json", None, "holds no preprocessor_config.json"),
    ("preprocessor_config.json", {"do_resize": False}, "only square images are supported"),
    ("config.json", {"model_type": "bert"}, "is no workdir|model_type is 'bert'"),
    ("config.json", {"vision_config": {"patch_size": 12}}, "patch_embedding.weight has shape"),
  ],
)
def test_directories_that_cannot_be_used(tmp_path, file, change, message):
  folder = tmp_path / "clip"
  shutil.copytree(REFERENCES / "clip", folder)
  if change is None:
    (folder / file).unlink()
  else:
    fields = json.loads((folder / file).read_text())
    for key, value in change.items():
      fields[key] = fields[key] | value if isinstance(value, dict) else value
    (folder / file).write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=message):
    pretrained.stock(pretrained.stock_config(folder))
