"""The server over HTTP: answers, limits, load, and a changing index."""

import re
import threading
import time
import urllib.parse

from tests.search.conftest import CAPTIONS, UNFAMILIAR, draw
from tests.serving.conftest import Client, running
from xe_retrieval.calibration import artifact
from xe_retrieval.search import image_sources, update
from xe_retrieval.serving import app as apps
from xe_retrieval.serving.limits import LIMITS

quote = urllib.parse.quote


def test_search_similar_and_thumbnails(client, photos):
  status, headers, about = client("/api/about")
  assert (status, about["images"], about["captions"]) == (200, 30, 0)
  known = about["calibration"]
  assert known["measured_on"] == "made up validation (100 captions × 100 images)"
  assert (
    known["relevant"] == "the image has a caption that says the same" and known["images"] == 100
  )
  assert (known["relevance"], known["default"], known["bank"]) == ("captions", 0.5, True)
  assert [row["min_probability"] for row in known["expect"]] == [p / 100 for p in range(1, 100)]

  status, _, everything = client("/api/search?q=a+red+circle&threshold=-1&top=200")
  assert status == 200 and everything["relevant"] and len(everything["results"]) == 30
  scores = [hit["score"] for hit in everything["results"]]
  assert scores == sorted(scores, reverse=True) and everything["best_score"] == scores[0]

  cut = (scores[4] + scores[5]) / 2
  status, _, some = client(f"/api/search?q=a+red+circle&threshold={cut}&near=3")
  assert some["results"] == everything["results"][:5]
  assert some["near_misses"] == everything["results"][5:8]
  status, _, batch = client("/api/search", "POST", {"queries": ["a red circle"], "threshold": cut})
  assert batch == [some | {"near_misses": []}]
  _, _, full = client(f"/api/search?q=a+red+circle&threshold={cut}&near=3&top=4")
  assert full["results"] == everything["results"][:4] and full["near_misses"] == []

  for asked, least in (("", 0.5), ("&min_probability=0.6", 0.6)):
    _, _, likely = client(f"/api/search?q=a+red+circle&top=200{asked}")
    assert likely["results"] == [h for h in everything["results"] if h["probability"] >= least]
    assert likely["expect"].items() <= known["expect"][round(100 * least) - 1].items()
  best = scores[0]
  _, _, none = client(f"/api/search?q=a+red+circle&threshold={min(best + 0.01, 1)}")
  assert not none["relevant"] and none["results"] == []

  first = everything["results"][0]
  status, headers, thumbnail = client(first["url"])
  assert (status, headers["content-type"], thumbnail[:4]) == (200, "image/png", b"\x89PNG")
  _, _, similar = client(f"/api/similar/{first['id']}?top=4")
  assert similar["image"]["image"] == first["image"] and len(similar["images"]) == 4
  assert first["id"] not in [hit["id"] for hit in similar["images"]]
  assert client(f"/api/image/{first['id']}")[2] == similar["image"]


def test_targets_and_unfamiliar_queries(client):
  def ask(query="a red circle", **asked):
    status, _, found = client(f"/api/search?{urllib.parse.urlencode({'q': query} | asked)}")
    assert status == 200
    return found

  few, many = ask(max_wrong=1), ask(max_wrong=3)
  assert few["expect"]["wrong_per_query"] <= 1 < many["expect"]["wrong_per_query"] <= 3
  plain, sure = ask(min_precision=0.7), ask(min_precision=0.7, guarantee="true")
  assert sure["expect"]["precision_at_least"] >= 0.7 and sure["threshold"] > plain["threshold"]
  never = ask(min_precision=0.99, near=2)
  assert not never["relevant"] and never["threshold"] is None and never["results"] == []
  assert len(never["near_misses"]) == 2 and never["best_probability"] > 0.5
  strange = ask(UNFAMILIAR)
  assert not strange["relevant"] and not strange["familiar"]
  assert len(strange["suggestions"]) == 3 and set(strange["suggestions"]) <= set(CAPTIONS)
  body = {"queries": ["a red circle", UNFAMILIAR], "min_precision": 0.7, "guarantee": True}
  assert client("/api/search", "POST", body)[2][0] == sure


def test_captions_that_fit_an_image(index, model, workdir, data_dir):
  update.update_index(index, model, workdir, [image_sources.parse("shapes/64:train", data_dir)])
  with running(index, model) as (port, service):
    client = Client(port)
    hit = client("/api/search?q=a&threshold=-1")[2]["results"][0]
    captions = client(f"/api/similar/{hit['id']}?top=9")[2]["captions"]
    shown = [caption["probability"] for caption in captions]
    assert len(shown) == 9 and shown == sorted(shown, reverse=True) and 0 < shown[-1] < 1
    # The same number as beside this image if the caption is searched for.
    query = quote(captions[0]["caption"])
    results = client(f"/api/search?q={query}&threshold=-1&top=200")[2]["results"]
    same = next(result for result in results if result["id"] == hit["id"])
    assert abs(same["probability"] - shown[0]) < 2e-4


def test_a_new_evaluation_is_loaded(index, model, workdir, tmp_path):
  """Scores only before it; the cached query is answered with probabilities after it."""
  moved = tmp_path / "moved"
  moved.mkdir()
  for name in ("config.json", "tokenizer", "checkpoints"):
    (moved / name).symlink_to(workdir / name)
  directory = index / "g000001"
  (directory / artifact.NAME).unlink()
  with running(index, model, moved) as (port, service):
    client = Client(port)
    assert client("/api/about")[2]["calibration"] is None
    status, _, found = client("/api/search?q=a+red+circle")
    assert status == 422 and "was not evaluated" in found["detail"]
    before = client("/api/search?q=a+red+circle&threshold=-1")[2]
    assert before["best_probability"] is None and before["familiar"]
    artifact.read(workdir, model.fingerprint()).write(moved)
    end = time.monotonic() + 30
    while service.searcher.calibration is None:
      assert time.monotonic() < end, "the calibration was not loaded"
      time.sleep(0.02)
    after = client("/api/search?q=a+red+circle&threshold=-1")[2]
    assert after["best_score"] == before["best_score"] and after["best_probability"] > 0.5


def test_errors_say_what_is_wrong(client):
  for path, status, sentence in [
    ("/api/search", 422, "search for what? q is words, like a picture"),
    (
      "/api/search?q=a&min_probabilty=0.5",
      422,
      "min_probabilty: there is no such option; see /api",
    ),
    ("/api/search?q=a&folder=nowhere", 422, "folder: no image is in 'nowhere'"),
    ("/api/search?q=a&since=yesterday", 422, "since: Input should be a valid date"),
    ("/api/search?like=0123456789abcdef", 404, "the index has no image 0123456789abcdef"),
    ("/api/search?q=", 422, "q: String should have at least 1 character"),
    ("/api/search?q=+", 422, "q: String should match"),
    (f"/api/search?q={'x' * 501}", 422, "q: String should have at most 500 characters"),
    (f"/api/search?q={'x' * 33000}", 414, "the address is longer than 32,768 bytes"),
    ("/api/search?q=a&top=0", 422, "top: Input should be greater than or equal to 1"),
    ("/api/search?q=a&top=201", 422, "top: Input should be less than or equal to 200"),
    ("/api/search?q=a&threshold=nan", 422, "threshold: "),
    ("/api/search?q=a&min_probability=1.1", 422, "min_probability: "),
    ("/api/search?q=a&max_wrong=inf", 422, "max_wrong: "),
    ("/api/search?q=a&threshold=0&max_wrong=1", 422, "max_wrong and threshold exclude each other"),
    ("/api/search?q=a&guarantee=true", 422, "guarantee needs min_precision"),
    ("/api/similar/../../etc/passwd", 404, "Not Found"),
    ("/api/similar/0123456789abcdef", 404, "the index has no image 0123456789abcdef"),
    ("/image/..%2f..%2fetc%2fpasswd", 404, "Not Found"),
    ("/image/zzzz", 422, "id: String should match pattern"),
    ("/photos/scene000.png", 404, "Not Found"),
    ("/docs", 404, "Not Found"),
  ]:
    found = client(path)
    assert (found[0], path) == (status, path)
    assert sentence in found[2]["detail"]
  for body, status, sentence in [
    ({"queries": ["a"] * 65}, 422, "queries: List should have at most 64 items"),
    ({"queries": []}, 422, "queries: List should have at least 1 item"),
    ({"queries": ["a", 3]}, 422, "queries.1: Input should be a valid string"),
    ({"queries": ["a"], "path": "/etc"}, 422, "path: there is no such option"),
    ({"queries": ["a"], "guarantee": 1}, 422, "guarantee: Input should be a valid boolean"),
    ({"queries": ["a"], "min_probability": 0.5, "min_precision": 0.5}, 422, "exclude each other"),
    (b"{", 400, "the body is not JSON"),
    ({"queries": ["a" * 300_000]}, 413, "the body is longer than 262,144 bytes"),
  ]:
    found = client("/api/search", "POST", body, {"content-type": "application/json"})
    assert found[0] == status and sentence in found[2]["detail"]
    client.connection.close()
  chunks = iter([b'{"queries": ["', *[b"a" * 50_000] * 6, b'"]}'])  # no Content-Length
  status, _, found = client("/api/search", "POST", chunks, {"content-type": "application/json"})
  assert (status, found["detail"]) == (413, "the body is longer than 262,144 bytes")
  client.connection.close()
  assert client("/api/search", "DELETE")[0] == 405


def test_foreign_hosts_and_scripts_are_rejected(client):
  status, _, content = client("/api/about", headers={"host": "evil.example:8000"})
  assert status == 421 and "localhost" in content["detail"]
  for host in ("localhost:8000", "10.0.0.7", "[::1]:8000"):
    client.connection.close()
    assert client("/api/about", headers={"host": host})[0] == 200
  status, headers, page = client("/")
  assert status == 200 and headers["x-content-type-options"] == "nosniff"
  assert "default-src 'none'" in headers["content-security-policy"]
  # No external resources, no inline scripts or styles, no HTML built from strings.
  assert not re.search(rb"https?://(?!www\.w3\.org)|<style|style=|onerror|onclick", page)
  scripts = [path.name for path in apps._FOLDER.glob("*.js")]
  assert len(scripts) > 5
  for name in scripts:
    script = client(f"/{name}")[2]
    assert not re.search(
      rb"innerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3)", script
    )


def test_a_damaged_image_has_a_placeholder(client, photos):
  hits = client("/api/search?q=a&threshold=-1&top=3")[2]["results"]
  (photos / hits[0]["image"]).unlink()
  (photos / hits[1]["image"]).write_text("root:x:0:0")
  (photos / hits[2]["image"]).unlink()
  (photos / hits[2]["image"]).symlink_to("/etc/passwd")
  for hit in hits:
    status, headers, content = client(hit["url"])
    assert (status, headers["content-type"]) == (200, "image/svg+xml")
    assert b"root" not in content and headers["cache-control"] == "no-store"


def test_a_full_queue_answers_429(index, model, monkeypatch):
  monkeypatch.setitem(LIMITS, "waiting", 4)
  with running(index, model) as (port, service):
    client = Client(port)
    status, headers, content = client("/api/search", "POST", {"queries": list("abcde")})
    assert (status, headers["retry-after"]) == (429, "1")
    assert content["detail"] == "more than 4 requests are waiting; ask again in a second"
    assert client("/api/search", "POST", {"queries": list("abcd"), "threshold": -1})[0] == 200
    monkeypatch.setattr(service, "_decoding", 4)
    url = client("/api/search?q=a&threshold=-1")[2]["results"][0]["url"]
    assert client(url)[0] == 429


def test_steady_under_load_while_the_index_is_replaced(index, photos, model, workdir):
  """Sixteen clients query without pause while the index is replaced three times: none fails."""
  with running(index, model) as (port, service):
    stop, failures, done = threading.Event(), [], []

    def ask(number):
      client, at = Client(port), 0
      while not stop.is_set():
        at += 1
        found = client(f"/api/search?q={number}+shapes+{at}&threshold=-1&top=5")
        if found[0] != 200 or len(found[2]["results"]) != 5:
          failures.append(found)
        hit = found[2]["results"][at % 5]
        status, headers, _ = client(hit["url"])
        if status not in (200, 404):  # 404: removed by the update
          failures.append((status, hit))
      done.append(at)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
      thread.start()
    for round in range(3):
      draw(photos, [100 + round])
      (photos / f"scene{round:03d}.png").unlink()
      update.update_index(index, model, workdir, [image_sources.Folder(photos)])
      wanted = f"g{round + 2:06d}"
      end = time.monotonic() + 30
      while service.searcher.collection.manifest["generation"] != wanted:
        assert time.monotonic() < end, "the new index was not loaded"
        time.sleep(0.02)
    stop.set()
    for thread in threads:
      thread.join()
  assert failures == [] and len(done) == 16 and min(done) > 0
