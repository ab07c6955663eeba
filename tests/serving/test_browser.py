"""The page as a person uses it, in Chromium driven by Playwright.

This test also takes the README's screenshot, on the quickstart's index:

  SEARCH_INDEX=runs/quickstart/index SEARCH_PICTURES=launch/pictures \
    python -m pytest tests/serving/test_browser.py -k type
"""

import collections
import os
import pathlib
import re

from playwright.sync_api import expect

from tests.search.conftest import UNFAMILIAR, draw
from tests.serving.conftest import LOADED, running
from xe_retrieval.calibration import artifact
from xe_retrieval.search import image_sources, update

COLUMNS = (
  "getComputedStyle(document.getElementById('results')).gridTemplateColumns.split(' ').length"
)
README = "?q=a+large+blue+diamond&p=0.8"


def test_type_look_slide_and_find_nothing(page, index, model, tmp_path):
  given = os.environ.get("SEARCH_INDEX")
  pictures = pathlib.Path(os.environ.get("SEARCH_PICTURES", tmp_path))
  errors = []
  page.on("pageerror", lambda error: errors.append(error.message))
  page.on("console", lambda message: message.type == "error" and errors.append(message.text))
  cards, slider = page.locator("#results .card"), page.locator("#slider")
  with running(given or index, model) as (port, _):
    page.goto(f"http://127.0.0.1:{port}/")
    expect(page.locator("#size")).to_contain_text("images are searched")
    expect(page.locator("#query")).to_be_focused()

    # Results appear while typing.
    page.keyboard.type("a red circle")
    expect(page.locator("#status")).to_contain_text("relevant")
    if not given:  # the random model's probabilities are made up: take every image
      slider.press("Home")
      expect(cards).to_have_count(30)
    page.wait_for_function(LOADED, arg=5)
    expect(page.locator("#results .card.above").first).to_be_visible()
    expect(cards.first.locator("b")).to_have_text(re.compile(r"^(> )?\d+ %$"))
    tooltip = re.compile(r"^how likely this image is relevant to this query .*; score -?0\.\d\d$")
    expect(cards.first.locator(".facts")).to_have_attribute("title", tooltip)
    expect(page.locator("#results img[loading=lazy]").first).to_be_visible()
    assert "q=a+red+circle" in page.url
    many = cards.count()

    # The slider to the right, by keyboard: fewer results, then none, and the page says so.
    before = page.locator("#promise").inner_text()
    assert (
      re.search(r"each at least 1 % sure · 30 results, about \d+ of them expected", before) or given
    )
    for _ in range(3):
      slider.press("PageUp")
    expect(page.locator("#promise")).not_to_have_text(before)
    assert cards.count() <= many
    slider.press("End")
    expect(page.locator("#nothing")).to_be_visible()
    expect(cards).to_have_count(0)
    for sentence in ("Nothing relevant", "The best of", "results need 99 %"):
      expect(page.locator("#nothing")).to_contain_text(sentence)
    page.locator("#peek").click()
    expect(page.locator("#misses .card")).to_have_count(12)
    page.locator("#lower").click()
    expect(cards.first).to_be_visible()
    expect(page.locator("#nothing")).to_be_hidden()

    # Arrow keys go from card to card: here to the second row and back.
    slider.press("Home")
    columns = page.evaluate(COLUMNS)
    cards.first.press("ArrowRight")
    expect(cards.nth(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(cards.nth(1 + columns)).to_be_focused()
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
      page.keyboard.press(key)
    expect(cards.first).to_be_focused()

    # Open an image by keyboard, then others from there, and close it.
    cards.first.press("Enter")
    expect(page.locator("#detail")).to_be_visible()
    expect(page.locator("#like .card")).to_have_count(12)
    page.wait_for_function("() => document.getElementById('large').naturalWidth > 0")
    for _ in range(3):
      before = page.locator("#name").inner_text()
      page.locator("#like .card").first.click()
      expect(page.locator("#name")).not_to_have_text(before)
    assert listeners(page, "large") == ["error"]
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()

    # An image that is gone since: the other results stay.
    before = cards.count()
    gone = {"status": 404, "json": {"detail": "the index has no image"}}
    page.route("**/api/similar/*", lambda route: route.fulfill(**gone))
    cards.first.press("Enter")
    expect(page.locator("#status")).to_have_text("the index has no image")
    assert cards.count() == before
    assert "404" in errors.pop()  # the browser's own line
    page.unroute("**/api/similar/*")

    # On a phone in dark mode nothing overflows.
    page.set_viewport_size({"width": 390, "height": 780})
    page.emulate_media(color_scheme="dark")
    slider.press("Home")
    page.wait_for_function(LOADED, arg=3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    expect(page.locator("body")).to_have_css("background-color", "rgb(20, 23, 28)")

    # The README's screenshot: results, and near misses in grey.
    page.set_viewport_size({"width": 1200, "height": 740})
    page.emulate_media(color_scheme="light")
    page.goto(f"http://127.0.0.1:{port}/{README if given else '?q=a+star&p=0.1'}")
    page.wait_for_function(LOADED, arg=13)
    page.screenshot(path=pictures / "search.png")
  assert errors == []


def listeners(page, id):
  """Kinds of events that an element listens to, once for each listener."""
  tools = page.context.new_cdp_session(page)
  found = tools.send("Runtime.evaluate", {"expression": f"document.getElementById('{id}')"})
  element = {"objectId": found["result"]["objectId"]}
  return [one["type"] for one in tools.send("DOMDebugger.getEventListeners", element)["listeners"]]


def test_an_unfamiliar_query_and_its_suggestions(page, index, model, tmp_path):
  with running(index, model) as (port, _):
    page.goto(f"http://127.0.0.1:{port}/?q={UNFAMILIAR}&p=0.01")
    expect(page.locator("#nothing")).to_be_visible()
    expect(page.locator("#unfamiliar")).to_contain_text("unlike anything this model was trained on")
    expect(page.locator("#lower")).to_be_hidden()
    suggestions = page.locator("#suggestions button")
    expect(suggestions).to_have_count(3)
    text = suggestions.first.inner_text()
    suggestions.first.click()
    expect(page.locator("#query")).to_have_value(text)
    expect(page.locator("#results .card")).to_have_count(30)
    expect(page.locator("#unfamiliar")).to_be_hidden()


def test_scores_only_without_an_evaluation(page, index, model, workdir, tmp_path):
  for name in ("config.json", "tokenizer", "checkpoints"):
    (tmp_path / name).symlink_to(workdir / name)
  (index / "g000001" / artifact.NAME).unlink()
  with running(index, model, tmp_path) as (port, service):
    page.goto(f"http://127.0.0.1:{port}/?q=a+red+circle")
    expect(page.locator("#nothing")).to_contain_text("scores -0.3")
    expect(page.locator("#promise")).to_contain_text("score at least 0.30 · probability unknown")
    page.locator("#lower").click()
    expect(page.locator("#results .card b").first).to_have_text(re.compile(r"^-0\.3\d$"))
    page.locator("#slider").press("Home")
    expect(page.locator("#results .card")).to_have_count(30)
    # Evaluated meanwhile: from the next search on, the slider is about probabilities.
    artifact.read(workdir, model.fingerprint()).write(tmp_path)
    while service.searcher.calibration is None:
      page.wait_for_timeout(50)
    page.locator("#query").fill("a red circle at the top")
    expect(page.locator("#promise")).to_contain_text("each at least 50 % sure")
    expect(page.locator("#measured")).to_contain_text("Probabilities as measured on made up")
    page.locator("#slider").press("Home")
    expect(page.locator("#results .card b").first).to_have_text(re.compile(r"^\d+ %$"))


def test_markup_is_shown_as_text(page, index, photos, model, workdir):
  """Queries and file names that contain HTML; also a broken image, a link and the / key."""
  evil = "circle <img src=x onerror=document.title='hacked'>"  # with a known word, as a query
  (photos / f"{evil}.png").write_bytes((photos / "scene000.png").read_bytes())
  update.update_index(index, model, workdir, [image_sources.Folder(photos)])
  cards = page.locator("#results .card")
  with running(index, model) as (port, service):
    page.goto(f"http://127.0.0.1:{port}/")
    expect(page.locator("#size")).to_contain_text("images are searched")
    page.keyboard.type(evil)
    page.locator("#slider").press("End")
    expect(page.locator("#status")).to_contain_text(evil)
    page.locator("#slider").press("Home")
    page.get_by_title(f"{evil}.png").click()
    expect(page.locator("#name")).to_contain_text(f"photos/{evil}.png")
    expect(page.locator("img[src=x]")).to_have_count(0)
    expect(page).to_have_title("Image search")

    # A link restores query and slider; an image that does not load is marked.
    collection = service.searcher.collection
    shown = collection.describe(collection.store.known("photos")[0][:1])[0]
    broken, name = shown["id"], shown["image"]
    page.route(f"**/image/{broken}", lambda route: route.abort())
    page.goto(f"http://127.0.0.1:{port}/?q=a+star&p=0.1")
    expect(cards).to_have_count(31)
    expect(page.locator("#query")).to_have_value("a star")
    page.get_by_title(name).scroll_into_view_if_needed()
    expect(page.locator(".card.broken")).to_have_attribute("title", name)

    # The / key moves the focus to the search box.
    cards.first.press("/")
    expect(page.locator("#query")).to_be_focused()


def test_busy_reloaded_and_locked_servers(page, index, photos, model, workdir):
  """The page asks again after 429, for the token after 401, and for /api/about after a reload."""
  with running(index, model, token="sesame") as (port, service):
    plain = f"http://127.0.0.1:{port}"
    page.goto(f"{plain}/api")
    page.locator("#token").fill("sesame")
    page.keyboard.press("Enter")
    expect(page.locator("section")).to_have_count(9)
    page.context.clear_cookies()
    # Behind a proxy that speaks https, the cookie never leaves it unencrypted.
    page.route(
      "https://photos.example/**",
      lambda route: route.fulfill(
        response=route.fetch(url=re.sub("https://[^/]*", plain, route.request.url))
      ),
    )
    page.goto("https://photos.example/")
    page.locator("#token").fill("sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#size")).to_contain_text("30 images are searched")
    (cookie,) = page.context.cookies()
    assert (cookie["name"], cookie["secure"], cookie["sameSite"]) == ("xe_token", True, "Strict")
    page.goto(plain)
    page.locator("#token").press("Escape")  # asks again
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#login")).to_contain_text("That was not the right one")
    page.locator("#token").fill("sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#size")).to_contain_text("30 images are searched")
    busy = {"status": 429, "headers": {"retry-after": "1"}, "json": {"detail": "busy"}}
    refused = collections.Counter()

    def answer(route):
      """Each search and each image is refused at first."""
      url = route.request.url
      refused[url] += 1
      return route.fulfill(**busy) if refused[url] == 1 else route.continue_()

    page.route(re.compile(r"/api/search\?|/image/"), answer)
    page.locator("#query").fill("a red circle")
    expect(page.locator("#status")).to_contain_text("of 30 images")
    shown = page.locator("#results .card, #misses .card").count()
    page.wait_for_function(LOADED, arg=min(shown, 10))  # images, too, are let in by the cookie
    assert shown > 10 and page.locator(".broken").count() == 0
    assert max(refused.values()) == 2
    draw(photos, [100])
    update.update_index(index, model, workdir, [image_sources.Folder(photos)])
    while len(service.searcher.collection) == 30:
      page.wait_for_timeout(50)
    page.locator("#query").fill("a blue circle")
    expect(page.locator("#status")).to_contain_text("of 31 images")


def test_the_api_is_described(page, index, model):
  requests = []
  page.on("request", lambda request: requests.append(request.url))
  with running(index, model) as (port, _):
    page.goto(f"http://127.0.0.1:{port}/api")
    expect(page.locator("h2 code").first).to_have_text("GET /api/search")
    expect(page.locator("section")).to_have_count(9)
    page.get_by_text("Parameters").first.click()
    expect(page.get_by_role("rowheader", name="min_probability").first).to_be_visible()
    page.get_by_text("Answer: application/json").first.click()
    page.get_by_text("results: Hit").first.click()
    expect(page.get_by_role("rowheader", name="likeness").first).to_be_visible()
    assert all(url.startswith(f"http://127.0.0.1:{port}/") for url in requests)
