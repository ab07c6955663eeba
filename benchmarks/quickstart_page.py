"""What a new user sees after the quickstart: four queries typed into the page, judged by truth.

  python -m benchmarks.quickstart_page [--index=runs/quickstart/index] [--screenshots=DIR]

"quarterly report" and "dog" have nothing relevant among drawn shapes; of the images shown for
"a small red circle", nine of ten contain one; "some shapes" is true of every image. The index is
that of the quickstart's test split. Needs Chromium and playwright; exits with 1 if a check fails.
"""

import argparse
import pathlib
import shutil
import sys

import numpy as np

from benchmarks.serve import Server
from xe_retrieval.data import pipeline, shapes
from xe_retrieval.search.collection import Collection

NOTHING = ("quarterly report", "dog")
PRECISE, VAGUE = "a small red circle", "some shapes"
MANY = 50  # results that the vague query gets at least
SHOWN = """() => [...document.querySelectorAll("#results .card")].map(
  (card) => [card.title, card.querySelector("b").textContent])"""

# Images outside the window are loaded lazily.
LOADED = """() => [...document.querySelectorAll(".card img")].every(
  (i) => i.complete || i.getBoundingClientRect().top > innerHeight)"""


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--index", default="runs/quickstart/index")
  parser.add_argument("--screenshots", default="", help="directory for one PNG per query")
  args = parser.parse_args()
  scenes = scenes_by_name(args.index)
  with Server(args.index) as port:
    seen = visit(port, (*NOTHING, PRECISE, VAGUE), args.screenshots)
  failed = [query for query, (status, shown) in seen.items() if not check(query, shown, scenes)]
  for query, (status, shown) in seen.items():
    print(
      f"{'FAILED' if query in failed else 'ok':8}{query!r}: {status}{tell(query, shown, scenes)}"
    )
  sys.exit(bool(failed))


def visit(port, queries, screenshots):
  """{query: (the status line, [(image, percentage) shown as results])}, as typed by a person."""
  from playwright.sync_api import expect, sync_playwright

  found = {}
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
      args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
    )
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.goto(f"http://127.0.0.1:{port}/")
    for query in queries:
      page.locator("#query").fill("")
      page.locator("#query").press_sequentially(query)
      page.locator("#query").press("Enter")
      expect(page.locator("#status")).to_contain_text(f"“{query}”")
      if page.locator("#unfamiliar").is_visible():
        print(f"        {page.locator('#unfamiliar').inner_text()!r}")
      if screenshots:
        page.wait_for_function(LOADED)
        page.screenshot(path=pathlib.Path(screenshots) / f"{query.replace(' ', '_')}.png")
      while page.locator("#more").is_visible():
        before = page.locator("#results .card").count()
        page.locator("#more").click()
        page.wait_for_function(
          "(n) => document.querySelectorAll('#results .card').length !== n", arg=before
        )
      found[query] = page.locator("#status").inner_text(), page.evaluate(SHOWN)
    browser.close()
  return found


def scenes_by_name(index):
  """{name shown for an image: its scene}."""
  collection = Collection(index)
  ((label, source),) = collection.sources.items()
  source = pipeline.Source(source.name, source.directory, source.split)
  scenes = source.column("scene").astype(np.int8)
  shown = collection.describe(collection.store.known(label)[0])
  return {about["image"]: scenes[int(about["image"])] for about in shown}


def right(query, shown, scenes):
  """bool [n]: whether the query is true of each image shown."""
  return shapes.relevance([query], np.stack([scenes[name] for name, _ in shown]))[0]


def check(query, shown, scenes):
  if query in NOTHING:
    return not shown
  enough = len(shown) >= (MANY if query == VAGUE else 1)
  return enough and right(query, shown, scenes).mean() >= 0.9


def tell(query, shown, scenes):
  if not shown:
    return ""
  words = f"; shown {shown[0][1]} … {shown[-1][1]}"
  if query in NOTHING:
    return words
  everywhere = shapes.relevance([query], np.stack(list(scenes.values())))[0].sum()
  true = right(query, shown, scenes).sum()
  return f"; {true} of {len(shown)} shown are right, {everywhere} in the collection{words}"


if __name__ == "__main__":
  main()
