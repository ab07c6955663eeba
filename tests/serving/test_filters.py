"""Filters of a server over files and over Milvus-lite: in the API and on the page."""

import os
import pathlib
import urllib.parse

import pytest
from playwright.sync_api import expect

from tests.search.conftest import store  # noqa: F401 over both
from tests.serving.conftest import Client, running
from xe_retrieval.search import image_sources, update


@pytest.fixture
def index(photos, model, workdir, tmp_path, store):  # noqa: F811
  """scene000 to scene029, with `stars`, 0 to 9, and a `tag` of every other."""
  names = sorted(path.relative_to(photos) for path in photos.rglob("*.png"))
  lines = ["image\tstars\ttag"]
  lines += [f"{name}\t{i % 10}\t{'' if i % 2 else 'a' + chr(34)}" for i, name in enumerate(names)]
  (tmp_path / "table.tsv").write_text("\n".join(lines) + "\n")
  sources = [image_sources.Folder(photos)]
  options = {"store": store, "columns": str(tmp_path / "table.tsv")}
  update.update_index(tmp_path / "index", model, workdir, sources, **options)
  return tmp_path / "index"


def test_filters(index, model):
  with running(index, model) as (port, _):
    client = Client(port)

    def found(text, path="api/search?q=a+red+circle&threshold=-1&top=100", **more):
      asked = urllib.parse.urlencode({"filter": text} | more)
      status, _, content = client(f"{path}&{asked}")
      return content["results"] if status == 200 else (status, content["detail"])

    everything = found("")
    assert len(everything) == 30
    for text, count in (
      ("stars >= 8", 6),
      ("stars in [1, 2] and not tag == 'b'", 3),  # of 6, those with a tag
      ("stars in [1, 2] and not tag == 'a\"'", 0),
      ("tag != 'b'", 15),
      ('folder like "photos/deeper%"', 10),
      ("name == 'scene003.png'", 1),
      ("date < '2000-01-01'", 0),
    ):
      some = found(text)
      assert len(some) == count, text
      ids = [hit["id"] for hit in some]
      assert [hit["id"] for hit in everything if hit["id"] in ids] == ids
    assert len(found("stars >= 8", folder="photos/deeper")) == 2
    assert len(found("stars >= 8", order="date", levels="true")) == 6
    like = everything[3]["id"]
    assert len(found("stars >= 8", f"api/search?like={like}&top=100")) in (5, 6)
    assert len(found("stars >= 8", "api/export?format=json&q=a&threshold=-1")) == 6
    body = {"queries": ["a", "b"], "filter": "stars >= 8", "threshold": -1}
    assert [answer["total"] for answer in client("api/search", "POST", body)[2]] == [6, 6]
    status, sentence = found("star > 1")
    assert status == 422 and sentence.startswith(
      "filter: character 1: 'star' is no column; columns"
    )
    assert "lie in each other" in found("(" * 60)[1]
    columns = client("api/about")[2]["columns"]
    assert {"column": "stars", "type": "whole"} in columns
    assert {"column": "tag", "type": "text"} in columns


def test_the_page(index, model, page, tmp_path):
  """SEARCH_PICTURES is where pictures of it go."""
  pictures = pathlib.Path(os.environ.get("SEARCH_PICTURES", tmp_path))
  status, field, wrong = (page.locator(f"#{x}") for x in ("status", "filter", "filter-error"))
  with running(index, model) as (port, _):
    page.goto(f"http://127.0.0.1:{port}/?q=a+red+circle&p=0.01")
    expect(status).to_contain_text("30 relevant of 30 images")
    page.locator("#filters summary").click()
    expect(page.locator("#columns")).to_contain_text("stars (whole number), tag (text)")
    field.fill("stars >= 8")
    field.press("Enter")
    expect(status).to_contain_text("6 relevant of 30 images")
    assert "filter=stars+%3E%3D+8" in page.url
    field.fill("stars = 8")
    field.press("Enter")
    expect(wrong).to_have_text("character 7: '=' is not understood; equality is ==")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#results .card")).to_have_count(6)  # those from before
    for scheme in ("light", "dark"):
      page.emulate_media(color_scheme=scheme)
      page.screenshot(path=pictures / f"filter-{scheme}.png")
    field.fill("stars > 100")
    field.press("Enter")
    expect(wrong).to_be_hidden()
    expect(page.locator("#why")).to_contain_text("No image is in this folder")
    page.go_back()
    page.goto(f"http://127.0.0.1:{port}/?q=a+red+circle&p=0.01&filter=nothing+==+1")
    expect(wrong).to_contain_text("'nothing' is no column")
    field.fill("")
    field.press("Enter")
    expect(status).to_contain_text("30 relevant of 30 images")
