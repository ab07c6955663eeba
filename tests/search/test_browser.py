"""The page as a person uses it, in a real browser.

The picture of the README is taken by this test on the quickstart's index:

  SEARCH_INDEX=runs/quickstart/index SEARCH_PICTURES=launch/pictures \
    python -m pytest tests/search/test_browser.py -k type
"""

import os
import pathlib

import pytest

from tests.search import chromium
from tests.search.conftest import running

CHROMIUM = chromium.find()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

QUERY = "a red circle"
README = "?q=a+large+blue+diamond&p=0.8"
CARDS = "document.querySelectorAll('#results .card').length"
SEEN = "[...document.querySelectorAll('#results img')].filter((i) => i.naturalWidth > 0).length"
NOTHING = "!document.getElementById('nothing').hidden"


def test_type_look_slide_and_find_nothing(index, model, tmp_path):
  given = os.environ.get("SEARCH_INDEX")
  pictures = pathlib.Path(os.environ.get("SEARCH_PICTURES", tmp_path))
  with running(given or index, model) as (port, _), chromium.page(CHROMIUM) as page:
    page.look(1200, 800)
    page.open(f"http://127.0.0.1:{port}/")
    page.wait("document.getElementById('size')?.textContent.includes('images are searched')")
    assert page.value("document.activeElement.id") == "query"
    page.screenshot(tmp_path / "start.png")

    # Type: images come without a further key.
    page.type(QUERY)
    page.wait("document.getElementById('status').textContent.length > 0")
    if not given:  # of the random model, all of them
      page.value("document.getElementById('slider').focus()")
      page.press("Home", 36)
      page.wait(f"{CARDS} === 30")
    page.wait(f"{SEEN} >= 5")
    assert page.value("document.querySelectorAll('#results .card.above').length") > 0
    assert page.value("document.querySelectorAll('#results img[loading=lazy]').length") > 0
    assert "q=a+red+circle" in page.value("location.search")
    many = page.value(CARDS)

    # Slide to the right, by keyboard: fewer, surer, then nothing, honestly.
    page.value("document.getElementById('slider').focus()")
    promised = page.value("document.getElementById('promise').textContent")
    for _ in range(3):
      page.press("PageUp", 33)
    assert page.value("document.getElementById('promise').textContent") != promised
    assert page.value(CARDS) <= many
    page.press("End", 35)
    page.wait(NOTHING)
    assert page.value(CARDS) == 0
    said = page.value("document.getElementById('nothing').innerText")
    assert "Nothing relevant" in said and "The best of" in said and "results need" in said
    page.screenshot(tmp_path / "nothing.png")
    page.click("document.getElementById('peek')")
    page.wait("document.querySelectorAll('#misses .card').length === 12")
    page.click("document.getElementById('lower')")
    page.wait(f"{CARDS} >= 1")
    assert not page.value(NOTHING)

    # An image, by keyboard: those like it, and back.
    page.value("document.querySelector('#results .card').focus()")
    page.press("Enter", 13)
    page.wait("document.getElementById('detail').open")
    page.wait("document.querySelectorAll('#like .card').length === 12")
    page.wait("document.getElementById('large').naturalWidth > 0")
    page.screenshot(tmp_path / "detail.png")
    page.press("Escape", 27)
    page.wait("!document.getElementById('detail').open")

    # On a phone, in the dark: nothing sticks out.
    page.look(390, 780, dark=True)
    page.wait("innerWidth === 390")
    page.value("document.getElementById('slider').focus()")
    page.press("Home", 36)
    page.value("scrollTo(0, 0)")
    assert page.value("document.documentElement.scrollWidth") <= 390
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page.value(colour) == "rgb(20, 23, 28)"
    page.wait(f"{SEEN} >= 3")
    page.screenshot(tmp_path / "phone.png")

    # What the README shows: results, and near misses in grey.
    page.look(1200, 740)
    page.open(f"http://127.0.0.1:{port}/{README if given else '?q=a+star&p=0.1'}")
    page.wait("document.querySelectorAll('.card').length > 12")
    page.wait("[...document.images].filter((i) => i.naturalWidth > 0).length > 12")
    page.screenshot(pictures / "search.png")
    assert page.errors == []


def test_words_stay_words(index, model):
  """Names and queries that look like markup are shown, not obeyed; a broken image says so."""
  evil = "<img src=x onerror=document.title='hacked'>"
  with running(index, model) as (port, _), chromium.page(CHROMIUM) as page:
    page.open(f"http://127.0.0.1:{port}/")
    page.wait("document.getElementById('size')?.textContent.includes('images are searched')")
    page.type(evil)
    page.value("document.getElementById('slider').focus()")
    page.press("End", 35)
    page.wait(NOTHING)
    assert evil in page.value("document.getElementById('status').textContent")
    assert page.value("document.querySelectorAll('img[src=x]').length") == 0
    assert page.value("document.title") == "Image search"
    # The address alone brings the page back.
    page.open(f"http://127.0.0.1:{port}/?q=a+star&p=0.1")
    page.wait(f"{CARDS} === 30")
    assert page.value("document.getElementById('query').value") == "a star"
    # The slash goes to the search box.
    page.value("document.querySelector('.card').focus()")
    page.press("/", 191)
    assert page.value("document.activeElement.id") == "query"
