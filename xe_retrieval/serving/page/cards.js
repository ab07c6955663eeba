// A card for each image: thumbnail, and how likely it is relevant.

import { button, make, percent } from "./words.js";

const RETRIES = 2;

export function loadImage(img, url, name) {
  let attempt = 0;
  img.alt = name;
  img.loading = "lazy";
  img.decoding = "async";
  img.onerror = () => { // a busy server refuses; a file that is missing has a placeholder
    if (attempt++ === RETRIES) return img.closest(".card, figure")?.classList.add("broken");
    setTimeout(() => { if (img.getAttribute("src") === url) img.src = url; }, 1000 * (0.5 + Math.random()));
  };
  img.src = url;
}

const TOOLTIP = "how likely this image is relevant to this query in this collection; score ";

export function card(hit, open) {
  const img = make("img");
  const bold = make("b");
  const facts = make("span", "facts", bold);
  if (hit.probability != null) {
    bold.textContent = percent(hit.probability);
    facts.title = TOOLTIP + hit.score.toFixed(2);
  } else {
    bold.textContent = hit.score.toFixed(2);
    facts.title = "how much alike the images are: the cosine of their vectors";
  }
  if (hit.likeness != null && hit.probability != null) {
    facts.append(make("span", "", `alike ${hit.likeness.toFixed(2)}`));
  }
  const made = button("card", make("span", "frame", img), () => open(hit.id));
  made.title = hit.image;
  made.append(facts);
  loadImage(img, hit.url, hit.image);
  return make("li", "", made);
}

/** Cards by image id, reused so that thumbnails are not loaded again. */
export class Cards {
  #known = new Map();

  constructor(open) {
    this.open = open;
  }

  clear() {
    this.#known.clear();
  }

  #of(hit) {
    if (!this.#known.has(hit.id)) this.#known.set(hit.id, card(hit, this.open));
    return this.#known.get(hit.id);
  }

  place(list, hits, above) {
    const items = hits.map((hit) => this.#of(hit));
    for (const item of items) item.firstChild.classList.toggle("above", above);
    const same = items.length === list.children.length && items.every((item, i) => item === list.children[i]);
    if (same) return;
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    list.replaceChildren(...items);
    if (focused?.isConnected) focused.focus();
  }
}

/** Arrow keys move between the cards of a grid. */
export function moveByArrows(event) {
  const grid = event.target.closest?.(".grid");
  if (!grid) return;
  const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
  const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  if (!move) return;
  const all = [...grid.querySelectorAll(".card")];
  const next = all[all.indexOf(event.target) + move];
  if (next) {
    event.preventDefault();
    next.focus();
  }
}
