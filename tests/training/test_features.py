"""Cached features of frozen towers: the same training as without, and never a stale cache."""

import json

import chex
import jax
import numpy as np
import pytest
from PIL import Image

from xe_retrieval import main, prepare
from xe_retrieval import model as models
from xe_retrieval.data import image_folder, pipeline, shapes, tokenization
from xe_retrieval.evaluation import embedded
from xe_retrieval.preparation import records
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import features, processes

ONE = jax.devices()[:1]


@pytest.fixture
def frozen(config, tmp_path):
  config.data.name = "shapes/32"
  config.text.freeze = config.image.freeze = "all"
  return config


def parts(config):
  source = pipeline.Source(config.data.name, config.data.dir, "train")
  tokenizer = tokenization.train(
    [c for r in source.captions() for c in r], 1000, config.text.tokens
  )
  config.text.vocab_size = tokenizer.vocab_size
  model = dual_encoder.from_config(config)
  return model, dual_encoder.init(config, model), tokenizer, source


def files(config):
  return sorted(f.name for f in features.directory(config).iterdir())


@pytest.fixture(scope="module")
def table(tmp_path_factory):
  """A prepared table of one to three captions per image, whose ids are hashes."""
  root = tmp_path_factory.mktemp("table")
  rows = ["split\timage\tcaption_id\tcaption"]
  for i in range(20):
    Image.fromarray(shapes.render(shapes.scene(0, "train", i))).save(root / f"{i}.png")
    split = "train" if i < 16 else "validation"
    captions = [f"{shapes.caption(0, 'train', i)} number {n}" for n in range(1 + i % 3)]
    rows += [f"{split}\t{i}.png\t{i}.png#{n}\t{c}" for n, c in enumerate(captions)]
  (root / "captions.tsv").write_text("\n".join(rows))
  job = prepare.table(str(root / "captions.tsv"), str(root), "t")
  prepare.prepare(job, str(root / "out"), records.Options())
  return str(root / "out")


def test_a_table_with_several_captions_per_image_trains_and_keeps_names_and_ids(
  frozen, table, tmp_path
):
  frozen.data.name, frozen.data.dir = "captions/t", table
  main.train(frozen, tmp_path, ONE)
  pairs = embedded.embed(
    models.restore(tmp_path, "latest"), pipeline.Source("captions/t", table, "validation")
  )
  assert len(pairs.image) == 4 and len(pairs.text) == 8  # 2 + 3 + 1 + 2 captions
  assert sorted(pairs.images.names) == ["16.png", "17.png", "18.png", "19.png"]
  owners = [pairs.images.names[m] for m in pairs.image_of_text]
  assert [name.partition("#")[0] for name in pairs.caption_ids] == owners


@pytest.mark.parametrize("tower", ["text", "image", "both", "both of a table"])
def test_batches_hold_the_features_of_the_same_pairs(frozen, table, tower):
  if "table" in tower:
    frozen.data.name, frozen.data.dir, tower = "captions/t", table, "both"
  if tower != "both":
    frozen["image" if tower == "text" else "text"].freeze = "none"
  model, variables, tokenizer, source = parts(frozen)
  tables = features.tables(frozen, variables, tokenizer, source)
  assert set(tables) == ({"text", "image"} if tower == "both" else {tower})
  plain = list(pipeline.train_batches(source, tokenizer, frozen))
  for n, batch in enumerate(features.batches(source, tokenizer, frozen, tables)):
    for key in ("image_id", "text_id"):
      np.testing.assert_array_equal(batch[key], plain[n][key])
    for name, field in (("text", "tokens"), ("image", "image")):
      expected = plain[n][field]
      if name in tables:
        expected = model.apply(variables, expected, method=f"{name}_features")
        field = f"{name}_features"
      np.testing.assert_allclose(batch[field], expected, rtol=1e-4, atol=1e-5)
  later = features.batches(source, tokenizer, frozen, tables, start=2)
  assert len(list(later)) == frozen.steps - 2


def test_training_only_moves_the_projections_as_it_would_without_a_cache(
  frozen, tmp_path, monkeypatch
):
  frozen.data.dir = str(tmp_path / "data")  # with no features of other tests
  frozen.text.optimizer = frozen.image.optimizer = "sgd"  # AdamW would amplify rounding errors
  frozen.text.learning_rate = frozen.image.learning_rate = 0.02
  cached = jax.device_get(main.train(frozen, tmp_path / "cached", ONE))
  model, variables, *_ = parts(frozen)
  chex.assert_trees_all_equal(
    cached.params["image"]["tower"], variables["params"]["image"]["tower"]
  )
  moved = cached.params["image"]["projection"]["kernel"]
  assert np.abs(moved - variables["params"]["image"]["projection"]["kernel"]).max() > 1e-4
  chex.assert_trees_all_equal(cached.batch_stats, variables["batch_stats"])
  before = files(frozen)
  assert len(before) == 4  # two towers, train and validation
  with monkeypatch.context() as without:
    without.setattr(features, "cacheable", lambda config: set())  # the towers run at each step
    run = jax.device_get(main.train(frozen, tmp_path / "run", ONE))
  chex.assert_trees_all_close(cached.params, run.params, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_equal(cached.batch_stats, run.batch_stats)
  losses = [
    [line["loss"] for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
     if "loss" in line] for name in ("cached", "run")
  ]  # fmt: skip
  np.testing.assert_allclose(*losses, rtol=1e-5)
  assert files(frozen) == before


def test_other_weights_sizes_or_data_make_another_cache(frozen, tmp_path):
  frozen.data.dir = str(tmp_path)
  model, variables, tokenizer, source = parts(frozen)
  tables = features.tables(frozen, variables, tokenizer, source)
  assert len(files(frozen)) == 2
  other = jax.tree.map(lambda x: x + 1e-3, variables)
  changed = features.tables(frozen, other, tokenizer, source)
  assert len(files(frozen)) == 4
  assert (changed["image"] != tables["image"]).any()
  frozen.image.size = 24
  features.tables(frozen, variables, tokenizer, source)
  assert len(files(frozen)) == 5
  validation = pipeline.Source(frozen.data.name, frozen.data.dir, "validation")
  assert validation.fingerprint() != source.fingerprint()
  assert all(f.endswith(".npy") for f in files(frozen))


@pytest.mark.parametrize("what", ["a split", "a folder", "mirrored"])
def test_an_interrupted_table_resumes_where_it_stopped(frozen, tmp_path, monkeypatch, what):
  frozen.data.dir = str(tmp_path)
  monkeypatch.setattr(features, "BATCH", 8)
  monkeypatch.setattr(processes, "SHARD", 1)
  _, *arguments, source = parts(frozen)
  if what == "a folder":
    (tmp_path / "photos").mkdir()
    for i in range(24):
      Image.fromarray(shapes.render(shapes.scene(0, "train", i))).save(tmp_path / f"photos/{i}.png")
    (tmp_path / "photos" / "5.png").write_bytes(b"broken")
    source = image_folder.open_images(str(tmp_path / "photos"))
  frozen.data.views = 2 if what == "mirrored" else 1
  name = "mirrored" if what == "mirrored" else "image"

  def compute():
    return features.tables(frozen, *arguments, source, towers=("image",))[name]

  whole = np.array(compute())
  path = sorted(features.directory(frozen).iterdir(), key=lambda path: len(path.name))[-1]
  assert path.name.startswith(f"{source.split}-image-") and len(whole) == len(source)
  path.unlink()

  real = pipeline.image_batches

  def interrupted(*arguments):
    for n, batch in enumerate(real(*arguments)):
      if n == 2:
        raise KeyboardInterrupt
      yield batch

  monkeypatch.setattr(pipeline, "image_batches", interrupted)
  with pytest.raises(KeyboardInterrupt):
    compute()
  shards = sorted(path.with_suffix(".shards").iterdir())
  assert [p.name for p in shards] == ["000000000-8.npy", "000000008-8.npy"] and not path.exists()
  first = np.load(shards[0])
  first[3] = 7  # stays, because finished shards are not computed again
  np.save(shards[0], first)
  monkeypatch.setattr(pipeline, "image_batches", real)
  found = compute()
  assert (found[3] == 7).all()
  np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(whole, 3, 0))
  assert {p.suffix for p in path.parent.iterdir()} == {".npy"}


def test_a_record_shows_its_photo_or_the_mirror_image_unless_its_caption_has_sides(frozen):
  frozen.data.name, frozen.data.views, frozen.steps = "shapes/64", 2, 12  # three epochs
  model, variables, tokenizer, source = parts(frozen)
  tables = features.tables(frozen, variables, tokenizer, source)
  (images,) = pipeline.image_batches(source, frozen.image.size, [slice(0, len(source))])
  right = model.apply(variables, images[:, :, ::-1], method="image_features")
  np.testing.assert_allclose(tables["mirrored"], right, rtol=1e-4, atol=1e-5)
  captions = [record[0] for record in source.captions()]
  sided = np.array(["left" in c or "right" in c for c in captions])
  assert 1 < sided.sum() < 32
  choose, seen = pipeline.choice(len(source), frozen), []
  for step, batch in enumerate(features.batches(source, tokenizer, frozen, tables)):
    records, draws = choose(step)
    mirror = (draws >= 2**62) & ~sided[records]
    expected = np.where(mirror[:, None], tables["mirrored"][records], tables["image"][records])
    np.testing.assert_array_equal(batch["image_features"], expected)
    seen.append(mirror[~sided[records]])
  assert 0.35 < np.concatenate(seen).mean() < 0.65
  later = list(features.batches(source, tokenizer, frozen, tables, start=step))
  np.testing.assert_array_equal(later[0]["image_features"], expected)
  plain = {name: table for name, table in tables.items() if name != "mirrored"}
  last = list(features.batches(source, tokenizer, frozen, plain, start=step))[0]
  chex.assert_trees_all_equal(
    *({k: v for k, v in b.items() if k != "image_features"} for b in (last, later[0]))
  )


def test_distractors_of_a_folder_are_embedded_from_cached_features(frozen, tmp_path):
  frozen.data.dir = str(tmp_path)
  model, *rest, source = parts(frozen)
  (tmp_path / "photos").mkdir()
  for i in range(5):
    (tmp_path / "photos" / f"{i}.png").write_bytes(source.image(i))
  encoder = models.Encoder(frozen, model, *rest, devices=ONE)
  folder = image_folder.open_images(str(tmp_path / "photos"))
  tables = features.of(encoder, folder, ("image",))
  assert [f[:13] for f in files(frozen)] == ["images-image-"]
  found = embedded.images(encoder, folder, tables)
  assert (found.captions, found.scenes, found.names) == (None, None, None)
  np.testing.assert_allclose(found.vectors, encoder.embed_source(folder), atol=1e-5)


@pytest.mark.parametrize(
  ("caption", "sided"),
  [
    ("a dog on the left", True),
    ("The LEFTMOST of two", True),
    ("his right-hand glove", True),
    ("turning rightwards", True),
    ("a bright cleft upright", False),
  ],
)
def test_captions_with_sides(caption, sided):
  assert bool(features._SIDED.search(caption)) == sided


def test_only_training_sees_mirrored_photos(frozen, tmp_path):
  frozen.data.dir, frozen.data.views = str(tmp_path), 2
  model, *rest, source = parts(frozen)
  assert set(features.tables(frozen, *rest, source)) == {"text", "image", "mirrored"}
  mirrored, plain = (name for name in files(frozen) if name.startswith("train-image-"))
  assert mirrored == plain.replace(".npy", "-mirrored.npy")
  validation = pipeline.Source(frozen.data.name, frozen.data.dir, "validation")
  assert set(features.tables(frozen, *rest, validation)) == {"text", "image"}
  encoder = models.Encoder(frozen, model, *rest, devices=ONE)
  assert set(features.of(encoder, source)) == {"text", "image"}
  frozen.data.views = 3
  with pytest.raises(ValueError, match=r"config\.data\.views=3 should be 1 or 2"):
    features.tables(frozen, *rest, source)
  frozen.data.views, frozen.image.freeze = 2, "none"
  with pytest.raises(ValueError, match=r"config\.data\.views=2 needs a frozen image tower"):
    features.tables(frozen, *rest, source)


def test_an_augmented_or_learning_tower_is_not_cached(frozen):
  frozen.data.augment = "random_resized_crop"
  assert features.cacheable(frozen) == {"text"}
  frozen.text.freeze = "0"
  assert features.cacheable(frozen) == set()
  frozen.text.freeze = str(frozen.text.layers)  # the same as "all"
  assert features.cacheable(frozen) == {"text"}


def test_without_a_frozen_tower_the_split_is_not_read(config, monkeypatch):
  _, *rest, source = parts(config)
  monkeypatch.setattr(source, "read", None)  # a call would fail
  assert features.tables(config, *rest, source) == {}


def test_loss_seed_optimiser_and_head_share_a_cache(frozen, tmp_path):
  frozen.data.dir = str(tmp_path)
  model, variables, tokenizer, source = parts(frozen)
  features.tables(frozen, variables, tokenizer, source)
  before = files(frozen)
  frozen.image.learning_rate, frozen.text.trunk = 1.0, 16
  frozen.seed, frozen.loss = 1, "sampled_softmax"
  features.tables(frozen, variables, tokenizer, source)
  assert files(frozen) == before
