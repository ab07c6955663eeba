"""Pictures as queries, filters, lists and the curve, in Chromium driven by Playwright."""

import json
import pathlib
import re

from playwright.sync_api import expect

from tests.search.conftest import draw
from tests.serving.conftest import running
from xe_retrieval.search import image_sources, update


def test_pictures_filters_lists_and_the_curve(page, index, photos, model, tmp_path):
  cards, status = page.locator("#results .card"), page.locator("#status")
  page.context.grant_permissions(["clipboard-read", "clipboard-write"])
  with running(index, model) as (port, _):
    page.goto(f"http://127.0.0.1:{port}/")
    # A picture from a file: the most alike first, without a slider.
    page.locator("#file").set_input_files(photos / "scene007.png")
    expect(status).to_have_text("30 of 30 images, the most alike first")
    expect(cards.first).to_have_attribute("title", "scene007.png")
    expect(page.locator("#chip")).to_be_visible()
    expect(page.locator("#sure")).to_be_hidden()
    # With words too: these decide what is relevant, a second slider about the order.
    page.locator("#query").fill("a red circle")
    expect(status).to_contain_text("relevant of 30 images")
    expect(page.locator("#mix")).to_be_visible()
    page.locator("#slider").press("Home")
    expect(cards).to_have_count(30)
    expect(cards.first.locator(".facts")).to_contain_text("alike")
    orders = []
    for key in ("Home", "End"):
      page.locator("#weight").press(key)
      with page.expect_response(re.compile(rf"weight={int(key == 'End')}&")):
        pass
      page.wait_for_function("() => !document.body.hasAttribute('aria-busy')")
      orders.append([card.get_attribute("title") for card in cards.all()])
    assert orders[0][0] == "scene007.png" and orders[0] != orders[1]
    page.locator("#unchoose").click()
    expect(page.locator("#chip")).to_be_hidden()

    # More like one of the results; a link to it.
    cards.first.click()
    page.locator("#more-like").click()
    expect(status).to_have_text("29 of 30 images, the most alike first")
    assert "like=" in page.url
    page.go_back()
    expect(page.locator("#query")).to_have_value("a red circle")

    # A pasted picture, and one that is dropped.
    for event, kind in (("paste", "clipboardData"), ("drop", "dataTransfer")):
      page.goto(f"http://127.0.0.1:{port}/")
      expect(page.locator("#size")).to_contain_text("images are searched")
      page.evaluate(
        """async ([event, kind]) => {
          const blob = await (await fetch((await (await fetch(
            "api/search?q=a&threshold=-1")).json()).results[0].url)).blob();
          const given = new DataTransfer();
          given.items.add(new File([blob], "x.png", { type: "image/png" }));
          dispatchEvent(event === "paste" ? new ClipboardEvent(event, { [kind]: given })
            : new DragEvent(event, { [kind]: given }));
        }""",
        [event, kind],
      )
      expect(status).to_have_text("30 of 30 images, the most alike first")
    # What cannot be searched by is refused, and the results stay.
    huge = {"name": "huge.png", "mimeType": "image/png", "buffer": bytes((16 << 20) + 1)}
    for given, sentence in [
      (index / "collection.json", "collection.json is no picture."),
      (huge, "huge.png has more than 16 MB."),
    ]:
      page.locator("#file").set_input_files(given)
      expect(status).to_have_text(sentence)
      expect(cards).to_have_count(30)

    # Filters and the order, with the slider.
    page.goto(f"http://127.0.0.1:{port}/?q=a+red+circle&p=0.01")
    page.locator("#filters summary").click()
    page.locator("#folder").select_option("photos/deeper")
    expect(status).to_contain_text("10 relevant of 30 images")
    page.locator("#order").select_option("date")
    expect(page).to_have_url(re.compile("folder=photos%2Fdeeper&order=date"))
    expect(cards).to_have_count(10)
    page.locator("#until").fill("1999-01-01")
    expect(page.locator("#why")).to_have_text(
      "No image is in this folder, of these dates and passes the filter."
    )

    # The list as files and in the clipboard.
    page.goto(f"http://127.0.0.1:{port}/?q=a+red+circle&p=0.01")
    expect(cards).to_have_count(30)
    with page.expect_download() as download:
      page.locator("#export-csv").click()
    assert len(pathlib.Path(download.value.path()).read_text().splitlines()) == 31
    with page.expect_download() as download:
      page.locator("#export-json").click()
    assert len(json.loads(pathlib.Path(download.value.path()).read_text())["results"]) == 30
    page.locator("#export-paths").click()
    expect(page.locator("#copied")).to_have_text("30 paths copied")
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert sorted(copied) == sorted(map(str, photos.rglob("*.png")))

    # The query's curve among others.
    page.locator("#show-curve").click()
    expect(page.locator("#plot .own")).to_have_count(1)
    expect(page.locator("#plot .hair")).to_have_count(40)
    expect(page.locator("#curve-note")).to_contain_text("Blue is yours, grey are captions")
    expect(page.locator("#plot .own")).to_have_css("stroke", "rgb(36, 103, 201)")
    expect(page.locator("#plot .cut")).to_have_count(1)
    assert page.locator("#plot .tick").all_text_contents()[:3] == ["30", "1", "10"]
    page.keyboard.press("Escape")


def test_many_results_come_page_by_page(page, index, photos, model, workdir):
  draw(photos, range(100, 160))
  update.update_index(index, model, workdir, [image_sources.Folder(photos)])
  with running(index, model) as (port, _):
    page.goto(f"http://127.0.0.1:{port}/?q=a+star&p=0.01")
    expect(page.locator("#status")).to_contain_text("90 relevant of 90 images")
    expect(page.locator("#results .card")).to_have_count(60)
    page.locator("#more").click()
    expect(page.locator("#results .card")).to_have_count(90)
    expect(page.locator("#more")).to_be_hidden()
