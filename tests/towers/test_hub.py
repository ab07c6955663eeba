"""Weights by their Hugging Face id, without a network."""

import shutil

import chex
import pytest

from tests.towers.conftest import REFERENCES
from xe_retrieval.towers import weight_files


def test_hugging_face_id_from_the_cache(load, tmp_path, monkeypatch):
  import huggingface_hub.constants

  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
  repo = tmp_path / "models--someone--tiny-bert"
  shutil.copytree(REFERENCES / "bert", repo / "snapshots" / ("0" * 40))
  (repo / "refs").mkdir()
  (repo / "refs" / "main").write_text("0" * 40)
  config, variables = load("text", "someone/tiny-bert")
  assert config.text.pretrained == "someone/tiny-bert"
  chex.assert_trees_all_equal(variables, load("text", REFERENCES / "bert")[1])
  with pytest.raises(
    ValueError, match="'someone/other' is neither a path .* nor a Hugging Face id"
  ):
    load("text", "someone/other")


def test_a_revision_is_fetched_once_and_then_read_without_asking(tmp_path, monkeypatch):
  import huggingface_hub
  from huggingface_hub.errors import LocalEntryNotFoundError

  asked = []

  def download(name, revision=None, local_files_only=False, allow_patterns=None):
    asked.append((name, revision, local_files_only))
    if local_files_only and not (tmp_path / revision).exists():
      raise LocalEntryNotFoundError("not here")
    if local_files_only:
      return str(tmp_path / revision)
    return str(shutil.copytree(REFERENCES / "bert", tmp_path / revision, dirs_exist_ok=True))

  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  for _ in range(2):
    assert weight_files.locate("someone/bert", "v1.0") == tmp_path / "v1.0"
  here, there = (("someone/bert", "v1.0", offline) for offline in (True, False))
  assert asked == [here, there, here]
  (tmp_path / "v1.0" / "model.safetensors").unlink()  # only a tokenizer was fetched, perhaps
  weight_files.locate("someone/bert", "v1.0")
  assert asked[3:] == [here, there]
