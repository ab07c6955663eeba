"""A picture as the query; counting, paging, filtering and exporting all results."""

import csv
import io
import json
import os
import re
import urllib.parse

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.search.conftest import draw
from tests.serving.conftest import Client, running
from xe_retrieval.search import asking, image_sources, update
from xe_retrieval.search import searcher as searchers
from xe_retrieval.serving import thumbnails

PNG = {"content-type": "image/png"}


def ask(client, address="/api/search", **asked):
  status, _, found = client(f"{address}?{urllib.parse.urlencode(asked)}")
  assert status == 200, found
  return found


def test_a_picture_finds_itself_and_more_like_it(client, photos):
  data = (photos / "scene007.png").read_bytes()
  status, _, found = client("/api/search?top=5", "POST", data, PNG)
  assert status == 200 and found["results"][0]["image"] == "scene007.png"
  first = found["results"][0]
  assert first["score"] == pytest.approx(1, abs=1e-3) and first["probability"] is None
  assert (found["query"], found["total"], found["familiar"]) == (None, 30, True)
  # The id that was answered stands for the picture; that of an image of the index, too.
  again = ask(client, like=found["like"], top=5)
  assert again == found
  alike = ask(client, like=first["id"], top=30)
  assert alike["total"] == 29 and first["id"] not in [hit["id"] for hit in alike["results"]]
  assert [hit["id"] for hit in alike["results"][:4]] == [h["id"] for h in found["results"][1:]]
  near = ask(client, like=first["id"], threshold=alike["results"][3]["score"], near=2)
  assert near["total"] == len(near["results"]) == 4 and len(near["near_misses"]) == 2


def test_words_decide_what_is_relevant_and_the_picture_the_order(client):
  words = ask(client, q="a red circle", top=200)
  relevant = {hit["id"] for hit in words["results"]}
  assert 3 < len(relevant) < 30
  like = words["results"][-1]["id"]
  both = ask(client, q="a red circle", like=like, weight=0, top=200)
  assert {hit["id"] for hit in both["results"]} == relevant - {like}
  shown = [hit["likeness"] for hit in both["results"]]
  assert shown == sorted(shown, reverse=True) and shown[0] > shown[-1]
  likeness = {hit["id"]: hit["likeness"] for hit in both["results"]}
  assert ask(client, q="a red circle", like=like, weight=1, top=200)["results"] == [
    hit | {"likeness": likeness[hit["id"]]} for hit in words["results"] if hit["id"] != like
  ]
  assert {h["id"]: h["probability"] for h in both["results"]}.items() <= {
    h["id"]: h["probability"] for h in words["results"]
  }.items()


def test_pictures_that_are_refused(client, photos, monkeypatch):
  monkeypatch.setattr(thumbnails, "MAX_PIXELS", 50_000_000)
  large = io.BytesIO()
  Image.new("1", (8_000, 8_000)).save(large, "PNG")
  for data, kind, status, sentence in [
    (b"root:x:0:0", "image/png", 422, "the picture cannot be read: it should be a file of one of"),
    (b"", "image/jpeg", 422, "the picture cannot be read"),
    (large.getvalue(), "image/png", 422, "8000 x 8000 pixels are too many"),
    (b"x", "text/plain", 415, "text/plain should be application/json, or image/… for a picture"),
  ]:
    found = client("/api/search", "POST", data, {"content-type": kind})
    assert found[0] == status and sentence in found[2]["detail"]
    client.connection.close()
  announced = PNG | {"content-length": str(17 << 20)}
  status, _, found = client("/api/search", "POST", b"", announced)
  assert (status, found["detail"]) == (413, "the body is longer than 16,777,216 bytes")
  client.connection.close()
  data = (photos / "scene007.png").read_bytes()
  status, _, found = client("/api/search?min_probability=0.5", "POST", data, PNG)
  assert status == 422 and "min_probability is about words" in found["detail"]


def test_counts_and_pages(client):
  everything = ask(client, q="a red circle", threshold=-1, top=200, levels="true")
  assert everything["total"] == 30
  shown = np.array([hit["probability"] for hit in everything["results"]])
  for percent in (1, 37, 50, 75, 99):
    passing = shown[shown >= percent / 100 - 1e-9]
    assert everything["levels"]["results"][percent - 1] == len(passing)
    wrong = everything["levels"]["wrong"][percent - 1]
    assert wrong == pytest.approx((1 - passing).sum(), abs=0.01)
  relevant = [hit for hit in everything["results"] if hit["probability"] >= 0.5]
  pages, offset = [], 0
  while page := ask(client, q="a red circle", top=3, offset=offset)["results"]:
    pages += page
    offset += 3
  assert pages == relevant and ask(client, q="a red circle", top=3)["total"] == len(relevant)


def test_filters_and_order(index, photos, model, workdir):
  for path in photos.rglob("*.png"):
    number = int(path.stem[5:])
    os.utime(path, (86_400 * number, 86_400 * number))  # scene007: 8 January 1970
  update.update_index(index, model, workdir, [image_sources.Folder(photos)])
  with running(index, model) as (port, _):
    client = Client(port)
    about = client("/api/about")[2]
    assert about["dates"] == ["1970-01-01", "1970-01-30"]
    exact = {"recall_at_10": 1.0, "queries": 0, "asked": "every image is compared with"}
    assert about["audit"] == exact
    assert about["folders"] == [
      {"folder": "photos", "images": 30},
      {"folder": "photos/deeper", "images": 10},
      {"folder": "photos/deeper/still", "images": 10},
    ]
    every = {"q": "a red circle", "threshold": -1, "top": 200}
    deeper = ask(client, **every, folder="photos/deeper")
    assert deeper["total"] == 10
    assert {hit["folder"] for hit in deeper["results"]} == {"photos/deeper/still"}
    expected = [h for h in ask(client, **every)["results"] if "deeper" in h["folder"]]
    assert deeper["results"] == expected
    newest = ask(client, **every, order="date")["results"]
    assert [hit["date"][-2:] for hit in newest] == [f"{day:02d}" for day in range(30, 0, -1)]
    few = ask(client, q="a red circle", order="date", top=2, offset=1)
    likely = ask(client, q="a red circle", top=200)["results"]
    likely.sort(key=lambda hit: hit["date"], reverse=True)
    assert few["results"] == likely[1:3] and few["total"] == len(likely)


def test_a_source_selects_its_images(index, photos, model, workdir, tmp_path):
  """Two folders of one name are told apart."""
  other = tmp_path / "elsewhere" / "photos"
  draw(other, range(40, 45))
  update.update_index(index, model, workdir, [image_sources.Folder(other)])
  with running(index, model) as (port, _):
    client = Client(port)
    sizes = {one["folder"]: one["images"] for one in client("/api/about")[2]["folders"]}
    assert sizes["photos"] == 30 and sizes["photos (2)"] == 5
    found = ask(client, q="a", threshold=-1, folder="photos (2)")
    assert sorted(hit["image"] for hit in found["results"]) == [
      f"scene{number:03d}.png" for number in range(40, 45)
    ]


def test_dates_select_and_may_leave_nothing(client, photos):
  assert ask(client, q="a", threshold=-1, since="1999-01-01")["total"] == 30
  none = ask(client, q="a", threshold=-1, until="1999-01-01")
  assert not none["relevant"] and none["results"] == [] and none["best_score"] is None
  assert ask(client, q="a", threshold=-1, until="1999-01-01", levels="true")["total"] == 0


def test_export_lists_every_result(client, photos):
  found = ask(client, q="a red circle", top=200)["results"]
  paths = [str(photos / hit["image"]) for hit in found]
  content = ask(client, "/api/export", q="a red circle").decode()
  rows = list(csv.DictReader(io.StringIO(content)))
  assert [row["path"] for row in rows] == paths
  assert [float(row["probability"]) for row in rows] == [hit["probability"] for hit in found]
  status, headers, listed = client("/api/export?q=a+red+circle&format=json")
  assert [row["path"] for row in listed["results"]] == paths
  assert headers["content-disposition"] == 'attachment; filename="results.json"'
  text = ask(client, "/api/export", q="a red circle", format="txt").decode()
  assert text.splitlines() == paths
  assert len(json.loads(json.dumps(listed))["results"]) == listed["total"]


def test_the_curve_counts_images_by_score(client):
  scores = [h["score"] for h in ask(client, q="a red circle", threshold=-1, top=200)["results"]]
  curve = ask(client, "/api/curve", q="a red circle")
  for score, images in zip(curve["scores"], curve["images"], strict=True):
    assert images == pytest.approx(sum(s >= score for s in scores), abs=1)  # scores are rounded
  assert curve["images"][0] == 30 and curve["images"][-1] == 0 and len(curve["others"]) == 40
  cut = ask(client, q="a red circle", min_probability=0.6)["threshold"]
  assert curve["thresholds"][59] == cut


def test_the_client_of_the_documentation(index, photos, model, capsys):
  page = (ROOT / "docs" / "search.md").read_text()
  (code,) = re.findall(r"^A client in Python:\n\n```python\n(.*?)^```", page, re.S | re.M)
  assert len([line for line in code.splitlines() if line]) <= 10
  with running(index, model, token="sesame") as (port, _):
    code = code.replace("http://127.0.0.1:8000/", f"http://127.0.0.1:{port}/")
    names = {}
    for text, ours in (('token=""', 'token="sesame"'), ("two dogs on a beach", "a red circle")):
      code = code.replace(text, ours)
    exec(code.replace("0.8", "0.3"), names)
    expected = names["search"]("a red circle", min_probability=0.3)["results"]
    shown = [f"{hit['probability']} {hit['image']}" for hit in expected]
    assert len(shown) > 0 and capsys.readouterr().out.splitlines() == shown
    picture = photos / "scene007.png"
    alike = names["search"](picture=picture, top=3)["results"]
    assert len(alike) == 3 and alike[0]["image"] == "scene007.png"
    both = names["search"]("a red circle", picture, threshold=-1, weight=0)["results"]
    assert both[0]["image"] == "scene007.png" and both[0]["probability"] > 0


def test_words_and_a_picture_where_nothing_is_relevant(client):
  """The picture itself is taken out of the results only where it is among them."""
  scores = [hit["score"] for hit in ask(client, q="a red circle", threshold=-1, top=200)["results"]]
  ids = [hit["id"] for hit in ask(client, q="a red circle", threshold=-1, top=200)["results"]]
  asked = {"q": "a red circle", "like": ids[20], "top": 2}
  none = ask(client, **asked, threshold=min(scores[0] + 0.01, 1))
  assert (none["total"], none["results"], none["relevant"]) == (0, [], False)
  for last in (4, 10, 25):
    for path in ("/api/search", "/api/export"):
      more = {"format": "json"} if "export" in path else {"levels": "true"}
      found = ask(client, path, **asked, **more, threshold=scores[last] - 2e-4)
      assert found["total"] == sum(s >= scores[last] - 2e-4 for s in scores) - (last >= 20)


def test_one_ask_that_fails_is_no_answer_to_others(index, model, monkeypatch):
  with running(index, model) as (_, service):
    loaded, order = service._current, asking._order

    def broken(searcher, ask, *more):
      if ask.top == 7:
        raise IndexError("no place")
      return order(searcher, ask, *more)

    monkeypatch.setattr(asking, "_order", broken)
    options = {name: None for name in ("folder", "since", "until", *searchers.CUT)}
    options |= {"threshold": -1, "filter": "", "guarantee": False}
    jobs = [("a", options | {"top": top}, None, None) for top in (3, 7, 4)]
    first, failed, last = loaded.answer(jobs)
    assert (first[1].results, last[1].results) == (3, 4) and isinstance(failed, IndexError)


def test_another_order_holds_only_the_results(index, model, client, monkeypatch):
  """Not all images, and not for those who ask at the same time."""
  scores = [hit["score"] for hit in ask(client, q="a red circle", threshold=-1, top=200)["results"]]
  with running(index, model) as (_, service):
    loaded, asked = service._current, []
    store, plain = loaded.searcher.collection.store, loaded.searcher.collection.store.scan

    def scan(vectors, k, *more):
      asked.append((len(vectors), k))
      return plain(vectors, k, *more)

    monkeypatch.setattr(store, "scan", scan)
    options = {name: None for name in ("folder", "since", "until", *searchers.CUT)}
    options |= {"threshold": scores[4], "filter": "", "guarantee": False, "top": 2}
    orders = ("best", "date", "best", "date")
    jobs = [("a red circle", options | {"order": order, "near": 1}, None, None) for order in orders]
    found = [one[1] for one in loaded.answer(jobs)]
    held = sum(score >= scores[4] - 1e-4 for score in scores)
    assert asked == [(2, 3), (1, held + 1), (1, held + 1)] and held < 30
    assert [len(one.ids) for one in found] == [2, 2, 2, 2]
    assert {one.total for one in found} == {sum(score >= scores[4] for score in scores)}
    jobs = [("a red circle", options | {"order": "date", "threshold": 1}, None, None)]
    (_, none) = loaded.answer(jobs)[0]
    assert (none.total, none.results) == (0, 0) and none.best[0] == scores[0]
