"""index --tokens and search --rerank over both stores; interruptions, changes, refusals."""

import contextlib
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import xe_retrieval
from tests.conftest import ROOT
from xe_retrieval import evaluate, index
from xe_retrieval.data import shapes
from xe_retrieval.search import searcher as searchers
from xe_retrieval.search import second_stage
from xe_retrieval.search.second_stage import token_files


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
  root = tmp_path_factory.mktemp("photos")
  for i in range(12):
    Image.fromarray(shapes.render(shapes.scene(0, "train", i))).save(root / f"{i:02}.png")
  return root


@pytest.fixture(scope="module", params=["files", "milvus"])
def made(request, photos, first_stage_dir, trained, tmp_path_factory):
  """An index with tokens; -> its path."""
  evaluate.evaluate(
    first_stage_dir, "validation", str(tmp_path_factory.mktemp("out")), rerank=str(trained[0]),
    candidates=6, report=False,
  )  # fmt: skip
  out = tmp_path_factory.mktemp("index") / "i"
  store = "" if request.param == "files" else f"milvus:{out.parent}/vectors.db,photos"
  if store:
    pytest.importorskip("milvus_lite")
  options = {"store": store, "tokens": str(trained[0])}
  index.index(first_stage_dir, [str(photos)], str(out), **options)
  return out


def second(path, trained, candidates=128):
  return second_stage.SecondStage(searchers.open_index(path), trained[0], candidates)


def test_results_are_ordered_by_both_stages(made, trained, first_stage_dir, photos):
  found = second(made, trained)
  query = shapes.caption(0, "train", 3)
  (answer,) = found.answers([[query]], top=5, min_probability=0.0)
  assert answer["query"] == query and answer["total"] == 12 and len(answer["results"]) == 5
  scores = [result["score"] for result in answer["results"]]
  assert scores == sorted(scores, reverse=True) and answer["best_score"] == scores[0]
  chances = [result["probability"] for result in answer["results"]]
  assert chances == sorted(chances, reverse=True) and chances[-1] >= 0 and chances[0] <= 1
  # By hand, from the pictures themselves.
  model, scorer = xe_retrieval.load(first_stage_dir), found._scorer
  names = sorted(photos.iterdir())
  first = model.score([query], names)[0]
  ids, final, _ = found.order(found.searcher.embed([query]))[0]
  paths = [about["path"] for about in found.searcher.collection.describe(ids)]
  first = dict(zip(map(str, names), first, strict=True))
  moved = np.array([f - first[path] for f, path in zip(final, paths, strict=True)])
  weight = found._mixture.weight
  assert (np.abs(moved).max() < 1e-4) == (weight == 0)
  tokens, there = found._files.read(ids)
  assert there.all() and tokens.shape == (12, *scorer.image_shape) and tokens.dtype == np.float16
  few = second(made, trained, 3).order(found.searcher.embed([query]))[0][0]
  best = sorted(first, key=first.get)[-3:]
  paths = [about["path"] for about in found.searcher.collection.describe(few)]
  assert sorted(paths) == sorted(best)


def test_only_new_and_changed_pictures_are_read(
  made, trained, first_stage_dir, photos, monkeypatch
):
  said = io.StringIO()
  with contextlib.redirect_stdout(said):
    assert index.index(first_stage_dir, [], str(made), tokens=str(trained[0])) is None
  assert "tokens of 0 images stored" in said.getvalue()
  searcher = searchers.open_index(made)
  ids, stamps = searcher.collection.store.known(next(iter(searcher.collection.sources)))
  files = token_files.TokenFiles(made, second(made, trained)._scorer.fingerprint)
  assert not files.lacking(ids, stamps).any()
  changed = stamps + np.eye(1, len(stamps), 4, dtype=np.int64).T
  np.testing.assert_array_equal(np.flatnonzero(files.lacking(ids, changed)), [4])
  assert not files.read(np.array([7], np.uint64))[1].any()


def test_an_interrupted_run_goes_on(photos, trained, first_stage_dir, tmp_path, monkeypatch):
  out = tmp_path / "i"
  index.index(first_stage_dir, [str(photos)], str(out))
  with pytest.raises(ValueError, match="has no tokens of this re-ranker: python -m .*--tokens="):
    second(out, trained)
  monkeypatch.setattr(token_files, "CHUNK", 5)
  real, calls = token_files._of_pictures, []

  def interrupted(*about):
    calls.append(about)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return real(*about)

  monkeypatch.setattr(token_files, "_of_pictures", interrupted)
  model = xe_retrieval.load(first_stage_dir)
  with pytest.raises(KeyboardInterrupt):
    second_stage.index_tokens(out, model, trained[0])
  assert second_stage.index_tokens(out, model, trained[0]) == (7, 0)
  assert len(second(out, trained)._files.ids) == 12


def test_the_command(made, trained):
  if (made.parent / "vectors.db").exists():
    pytest.skip("Milvus-lite's file is held by this process")
  command = [sys.executable, "-m", "xe_retrieval.search", f"--index={made}", "--json"]
  command += [f"--rerank={trained[0]}", "--candidates=4", "--min_probability=0", "a red circle"]
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  out = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
  assert out.returncode == 0, out.stderr
  assert json.loads(out.stdout)["total"] == 4
  out = subprocess.run(
    [*command[:-2], "--max_wrong=1", "x"], capture_output=True, text=True, env=env, cwd=ROOT
  )
  assert out.returncode == 2 and "--max_wrong is not for --rerank" in out.stderr


def test_the_server_orders_anew_on_request(made, trained):
  from tests.serving.conftest import Client, running

  query = shapes.caption(0, "train", 3).replace(" ", "+")
  with running(str(made), rerank=str(trained[0])) as (port, _):
    client = Client(port)
    assert client("/api/about")[2]["rerank"] == 128
    status, _, answer = client(f"/api/rerank?q={query}")
    _, _, first = client(f"/api/search?q={query}&threshold=-1")
    assert status == 200 and len(answer["results"]) == 12
    assert {hit["id"] for hit in answer["results"]} == {hit["id"] for hit in first["results"]}
    scores = [hit["score"] for hit in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert client(f"/api/rerank?q={query}&filter=nonsense")[0] == 422
    assert client("/api/rerank")[0] == 422
    assert client(f"/api/rerank?q={query}&folder=nowhere")[0] == 422
    assert client(f"/api/rerank?q={query}&since=2150-01-01")[2]["results"] == []
  with running(str(made)) as (port, _):
    client = Client(port)
    assert client("/api/about")[2]["rerank"] is None
    status, _, answer = client(f"/api/rerank?q={query}")
    assert status == 422 and "serve --rerank" in answer["detail"]
