"""Training of a re-ranker: deterministic, resumable, the same on several devices."""

import json

import chex
import jax
import numpy as np
import pytest

from xe_retrieval import export, main
from xe_retrieval.reranking import batches, scorer, settings, step
from xe_retrieval.towers import joint

ONE = jax.devices()[:1]


def run(config, workdir, devices=ONE):
  return jax.device_get(main.train(config, workdir, devices))


def test_two_runs_with_one_seed_are_bit_identical_and_logged(config, trained, tmp_path):
  chex.assert_trees_all_equal(run(config, tmp_path), trained[1])
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
  names = {name for line in lines for name in line}
  assert {"loss", "list_recall@1/first_stage", "list_recall@1/reranked"} <= names
  assert {"validation/pr_auc", "validation/recall@1", "learning_rate/joint"} <= names
  written = json.loads((tmp_path / "config.json").read_text())
  assert written["tokens"] | {"towers": ""} == {
    "text_width": 16, "image_width": 16, "places": 4, "towers": ""}  # fmt: skip


def test_another_config_is_refused_in_the_same_workdir(config, tmp_path):
  config.steps = 2
  run(config, tmp_path)
  config.steps = 4
  with pytest.raises(ValueError, match="config.steps: 2 → 4"):
    run(config, tmp_path)


def test_an_interrupted_run_goes_on_where_it_stopped(config, trained, tmp_path, monkeypatch):
  real = batches.Batches.__call__

  def interrupted(self, start=0):
    for n, batch in enumerate(real(self, start)):
      if n == 3:
        raise KeyboardInterrupt
      yield batch

  with monkeypatch.context() as cut:
    cut.setattr(batches.Batches, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
      run(config, tmp_path)
  assert not any((tmp_path / "checkpoints" / "4").glob("*"))
  chex.assert_trees_all_equal(run(config, tmp_path), trained[1])


def test_eight_devices_agree_with_one(config, tmp_path):
  config.joint.dropout = config.joint.input_dropout = 0.0
  config.joint.optimizer = "sgd"  # AdamW would amplify rounding errors
  one, eight = run(config, tmp_path / "one"), run(config, tmp_path / "eight", None)
  chex.assert_trees_all_close(one.params, eight.params, atol=1e-5)


def test_it_learns_its_lists(config, tmp_path):
  config.steps = config.eval_every = config.checkpoint_every = 60
  config.log_every = 10
  config.joint.dropout = config.joint.input_dropout = 0.0
  run(config, tmp_path)
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
  losses = [line["loss"] for line in lines if "loss" in line]
  assert losses[-1] < 0.8 * losses[0]
  reranked = [line["list_recall@1/reranked"] for line in lines if "loss" in line]
  assert reranked[-1] > lines[0]["list_recall@1/first_stage"]


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    ("loss", "snm", "config.loss='snm' should be one of sampled_softmax, cross_example"),
    ("hard", 6, "config.mined=5 should be at least 6"),
    ("candidates", 2, "config.candidates=2 should be from 3, the own image and config.hard, to 24"),
    ("joint.optimizer", "lion", "config.joint.optimizer='lion' should be one of adamw, sgd"),
    ("first_stage", "", "re-rank what"),
    ("first_stage", "nowhere", "'nowhere' should be the workdir of a trained dual encoder"),
  ],
)
def test_wrong_fields_are_named(config, tmp_path, field, value, said):
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=said):
    run(config, tmp_path)
  assert not list(tmp_path.iterdir())


def test_a_batch_holds_own_images_hard_ones_and_no_false_negatives(config, first):
  config = settings.resolve(config, first)
  split = first.split("train")
  mined = first.mined(split, config.mined)
  made = batches.Batches(split, mined, config)
  pairs, found = split.pairs, list(made())
  assert len(found) == config.steps
  for n, batch in enumerate(found):
    chex.assert_shape(batch["rows"], (8, 6))
    chex.assert_shape(batch["image"], (24, 4, 16))
    records, draws = batches.pipeline.choice(len(split.source), config)(n)
    captions = split.source.column("text_ids").starts[records]  # one caption per record
    grid = batch["image"][batch["rows"][:, 0]]
    np.testing.assert_array_equal(grid, split.grid[split.record_of_image[
      split.image_of_record[records]]])  # fmt: skip
    assert not batch["negative"][:, 0].any() and batch["negative"][:, 1:3].all()
    drawn = batch["rows"][:, 1:3]
    assert len(np.unique(drawn[0])) == 2
    # What the lists hold, by their tokens: no two images of the drawn set have the same.
    image = (split.grid[:, None] == batch["image"]).all((2, 3)).argmax(axis=0)  # records
    image = split.image_of_record[image][batch["rows"]]
    for caption, row, negative, scores in zip(
      captions, image, batch["negative"], batch["first"], strict=True
    ):
      assert not np.isin(row[negative], split.owners.of(caption)).any()
      assert len(set(row[negative])) == negative.sum()
      assert set(row[1:3]) <= set(mined[caption])
      np.testing.assert_allclose(scores, pairs.image[row] @ pairs.text[caption], atol=1e-5)
  again = list(batches.Batches(split, mined, config)(2))
  chex.assert_trees_all_equal(again, found[2:])
  halves = [batches.Batches(split, mined, config, p, 2)() for p in range(2)]
  for whole, *parts in zip(found, *halves, strict=True):
    joined = {name: np.concatenate([part[name] for part in parts]) for name in whole}
    chex.assert_trees_all_equal(joined, whole)


def test_mined_images_are_the_highest_wrong_ones(first):
  split = first.split("train")
  mined = first.mined(split, 5)
  scores = split.pairs.text @ split.pairs.image.T
  for caption, row in enumerate(mined):
    wrong = np.setdiff1d(np.arange(scores.shape[1]), split.owners.of(caption))
    expected = np.sort(scores[caption, wrong])[::-1][:5]
    np.testing.assert_allclose(scores[caption, row], expected, rtol=1e-5)
    assert np.isin(row, wrong).all()
  ids = split.source.column("text_ids").flat
  for caption in range(len(mined)):
    same = split.pairs.image_of_text[ids == ids[caption]]
    assert set(split.owners.of(caption)) == set(same)


def test_a_trained_reranker_is_restored(trained):
  found = scorer.restore(trained[0])
  assert found.step in (2, 4) and found.image_shape == (3, 16) and found.bytes_per_image == 96
  latest = scorer.restore(trained[0], "latest")
  chex.assert_trees_all_equal(latest.params, trained[1].params["joint"])
  assert latest.fingerprint == scorer.restore(trained[0], "latest").fingerprint


def test_dry_run_and_a_dual_encoder_in_its_place(config, first_stage_dir):
  from xe_retrieval.reranking import training

  assert "48 pairs and 24 images in a step, 96 bytes stored" in training.describe(config)
  with pytest.raises(ValueError, match="holds no re-ranker but a dual encoder"):
    scorer.restore(first_stage_dir)


def test_the_first_logits_are_zero(config, first):
  config = settings.resolve(config, first)
  built = step.build(config, step.mesh_lib.make(ONE))
  params = step.init(config, built).params["joint"]
  assert not params["head"]["logit"]["kernel"].any() and not params["head"]["logit"]["bias"].any()


def test_an_exported_reranker_reads_back_and_runs_with_jax_alone(trained, tmp_path):
  out = export.export(trained[0], tmp_path / "out")
  before, after = scorer.restore(trained[0]), scorer.restore(out)
  assert after.fingerprint == before.fingerprint
  chex.assert_trees_all_equal(jax.device_get(after.params), jax.device_get(before.params))
  run = {n: jax.export.deserialize((out / f"{n}.jax").read_bytes()).call for n in FUNCTIONS}
  random = np.random.default_rng(0)
  for n, b, k, t in ((3, 2, 4, 5), (7, 1, 2, 9)):
    grid = np.float16(random.normal(size=(n, 4, 16)))
    image = run["image_tokens"](grid)
    text = np.float16(random.normal(size=(b, t, 16)))
    known, rows = np.ones((b, t), bool), random.integers(0, n, (b, k)).astype(np.int32)
    first = np.float32(random.normal(size=(b, k)))
    found = run["logits"](text, known, np.float16(image), rows, first)
    model = joint.from_config(before.config)
    expected = model.apply(
      {"params": before.params}, text, known, grid, rows, before.config.scale * first
    )
    np.testing.assert_allclose(found, expected, atol=2e-2)
  with pytest.raises(ValueError, match="is not empty"):
    export.export(trained[0], out)
  (out / "joint.safetensors").write_bytes(b"broken")
  with pytest.raises(ValueError, match="joint.safetensors cannot be read"):
    scorer.restore(out)


FUNCTIONS = ("image_tokens", "logits")
