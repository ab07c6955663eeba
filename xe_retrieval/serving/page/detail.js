// One image: large, with captions that fit it and images like it.

import { card, loadImage } from "./cards.js";
import { request } from "./requests.js";
import { $, button, make, percent } from "./words.js";

let shown = null; // the image

/** `ask` searches for a caption, `like` for images like this one, `passes` tells what is relevant. */
export function listen(ask, like, passes, failed) {
  const open = async (id) => {
    let found;
    try {
      found = await request(`api/similar/${id}?top=12`);
    } catch (error) { // the image may be gone since the search: the other results still stand
      return failed(error.message);
    }
    shown = found.image;
    $("large").parentElement.classList.remove("broken");
    loadImage($("large"), `${shown.url}?large=true`, shown.image);
    $("name").textContent = [`${shown.folder}/${shown.image.split("/").at(-1)}`, shown.date].filter(Boolean).join(" · ");
    $("fits").hidden = !found.captions.length;
    $("captions").replaceChildren(...found.captions.slice(0, 6).map((caption) => {
      const line = button(passes(caption) ? "above" : "below", caption.caption, () => ask(caption.caption));
      const sure = caption.probability == null ? caption.score.toFixed(2) : percent(caption.probability);
      const facts = make("span", "", sure);
      facts.title = `score ${caption.score.toFixed(2)}`;
      line.append(facts);
      return make("li", "", line);
    }));
    $("like").replaceChildren(...found.images.map((hit) => card(hit, open)));
    if (!$("detail").open) $("detail").showModal();
    $("detail").scrollTop = 0;
  };
  $("more-like").addEventListener("click", () => {
    $("detail").close();
    like(shown);
  });
  for (const dialog of document.querySelectorAll("dialog.closable")) {
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }
  return open;
}
