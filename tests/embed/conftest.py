"""A tiny model, and a folder of drawn scenes beside hostile names and files."""

import os

import pytest

import xe_retrieval
from tests.search.conftest import draw, make_workdir
from xe_retrieval.search import image_sources

PICTURES = 40
HOSTILE = ["new\nline.png", "caf\udce9 <b>.png", "tab\t'quote\".jpg", "a%20b.PNG", "日本.webp"]
BROKEN = ["empty.jpg", "gone.gif", "pipe.jpg", "words.png"]


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
  return make_workdir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(workdir):
  return xe_retrieval.load(workdir)


@pytest.fixture
def photos(tmp_path):
  folder = tmp_path / "photos"
  draw(folder, range(30))
  draw(folder / "deeper" / "st\nill", range(30, PICTURES))
  draw(folder / ".hidden", range(3))
  (folder / "deeper" / "again").symlink_to(folder)  # is not followed
  whole = (folder / "scene000.png").read_bytes()
  for name in [*HOSTILE, "..hidden.png"]:
    (folder / name).write_bytes(whole)
  (folder / "words.png").write_text("words")
  (folder / "empty.jpg").write_bytes(b"")
  (folder / "gone.gif").symlink_to("nowhere")
  os.mkfifo(folder / "pipe.jpg")  # opening it would wait forever
  (folder / "notes.txt").write_text("not even meant")
  return folder


@pytest.fixture
def source(photos):
  return image_sources.Folder(photos)
