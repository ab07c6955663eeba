"""The page for everybody: contrast, names and sizes, checked by axe-core in Chromium.

The screenshots are kept where SEARCH_PICTURES says; SEARCH_INDEX names another index.
"""

import os
import pathlib

import pytest
from playwright.sync_api import expect

from tests.serving.conftest import LOADED, running

SIZES = {"phone": (390, 780), "tablet": (820, 1180), "desktop": (1440, 900)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible_at_every_size(page, index, photos, model, scheme, tmp_path):
  """No violation of WCAG 2 A and AA that axe-core finds, and nothing overflows."""
  axe = pathlib.Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
  if not axe.exists():
    pytest.skip("axe-core is not installed: npm install --prefix tests/serving")
  given = os.environ.get("SEARCH_INDEX")
  pictures = pathlib.Path(os.environ.get("SEARCH_PICTURES", tmp_path))
  query = os.environ.get("SEARCH_QUERY", "a+red+circle")
  page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
  with running(given or index, None if given else model) as (port, _):
    for name, (width, height) in SIZES.items():
      page.set_viewport_size({"width": width, "height": height})
      for state in ("start", "results", "nothing", "picture", "detail", "curve", "api"):
        address = {"start": "", "api": "api"}.get(state, f"?q={query}&p=0.3")
        page.goto(f"http://127.0.0.1:{port}/{address}")
        if state == "api":
          expect(page.locator("section").first).to_be_visible()
        elif state == "start":
          expect(page.locator("#size")).to_contain_text("images are searched")
        else:
          expect(page.locator("#status")).to_contain_text("relevant")
          page.wait_for_function(LOADED, arg=1)
        if state == "nothing":
          page.locator("#slider").press("End")
        elif state == "picture":  # with words, and the filters open
          page.locator("#file").set_input_files(photos / "scene007.png")
          expect(page.locator("#results .card .facts").first).to_contain_text("alike")
          page.locator("#filters summary").click()
        elif state == "detail":
          page.locator("#results .card").first.click()
          expect(page.locator("#like .card").first).to_be_visible()
        elif state == "curve":
          page.locator("#show-curve").click()
          expect(page.locator("#plot .own")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=pictures / f"{state}-{name}-{scheme}.png")
        found = axe_violations(page, axe)
        assert found == [], (state, name, found)


def axe_violations(page, axe):
  page.evaluate(axe.read_text())  # a script element is against the page's own policy
  tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
  found = page.evaluate("(tags) => axe.run({ runOnly: tags })", tags)["violations"]
  return [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found]
