// Types go to the server once; the slider then cuts what has arrived, without asking again.
// All text from elsewhere is set as textContent, so that it stays text.

const $ = (id) => document.getElementById(id);
const PAGE = 60; // images that are asked for at a time
const NEAR = 12; // near misses that are shown

let about = null; // /api/about
let hits = []; // all images of the query that have arrived, best first
let shownFor = ""; // their query
let asked = PAGE;
let peeking = false; // near misses are shown though nothing is relevant
let request = null;
let timer = 0;

// ---- the slider: precision where it is known, else the plain score ----

function ends() {
  const curve = about.thresholds;
  return curve ? [curve.precision[0], curve.precision.at(-1)] : [-1, 1];
}

function wanted() {
  const [low, high] = ends();
  return low + (high - low) * $("slider").value / 1000;
}

function setWanted(value) {
  const [low, high] = ends();
  $("slider").value = Math.round(1000 * (value - low) / (high - low || 1));
}

/** Index of the lowest threshold with this precision. */
function rowFor(precision) {
  const row = about.thresholds.precision.findIndex((p) => p >= precision - 1e-9);
  return row < 0 ? about.thresholds.precision.length - 1 : row;
}

function threshold() {
  return about.thresholds ? about.thresholds.threshold[rowFor(wanted())] : wanted();
}

function expected(score) {
  const { threshold, precision } = about.thresholds;
  let row = 0;
  while (row + 1 < threshold.length && threshold[row + 1] <= score) row++;
  return precision[row];
}

const percent = (share) => `${Math.round(100 * share)} %`;
const number = (n) => n.toLocaleString("en");

function showPromise() {
  const cut = Math.max(threshold(), -1).toFixed(2);
  const bold = document.createElement("b");
  const rest = document.createElement("span");
  if (about.thresholds) {
    bold.textContent = `expected precision ${percent(wanted())}`;
    rest.textContent = cut <= -1 ? " · every image" : ` · score at least ${cut}`;
  } else {
    bold.textContent = `score at least ${cut}`;
    rest.textContent = " · precision unknown: the model was not evaluated";
  }
  $("promise").replaceChildren(bold, rest);
  $("slider").setAttribute("aria-valuetext", bold.textContent + rest.textContent);
}

// ---- cards ----

function picture(img, url, name) {
  img.alt = name;
  img.loading = "lazy";
  img.decoding = "async";
  img.addEventListener("error", () => img.closest(".card, figure")?.classList.add("broken"));
  img.src = url;
}

function card(hit) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "card";
  button.title = hit.image;
  const frame = document.createElement("span");
  frame.className = "frame";
  const img = document.createElement("img");
  frame.append(img);
  const facts = document.createElement("span");
  facts.className = "facts";
  const score = document.createElement("b");
  score.textContent = hit.score.toFixed(2);
  facts.append(score);
  if (hit.precision != null) {
    facts.append(percent(hit.precision));
    facts.title = `score ${hit.score}; of everything from this score on, ${percent(hit.precision)} is relevant`;
  }
  button.append(frame, facts);
  item.append(button);
  picture(img, hit.url, hit.image);
  button.addEventListener("click", () => openDetail(hit.id));
  return item;
}

/** Keeps the cards that are there already: only what changes sides is moved. */
const cards = new Map();
function cardOf(hit) {
  if (!cards.has(hit.id)) cards.set(hit.id, card(hit));
  return cards.get(hit.id);
}

function place(list, wantedHits, above) {
  const items = wantedHits.map(cardOf);
  for (const item of items) item.firstChild.classList.toggle("above", above);
  if (items.length !== list.children.length || items.some((item, i) => item !== list.children[i])) {
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    list.replaceChildren(...items);
    focused?.isConnected && focused.focus();
  }
}

// ---- what the page shows ----

function show() {
  const searching = Boolean(shownFor);
  $("start").hidden = searching;
  $("failed").hidden = true;
  $("sure").hidden = !about;
  if (!about) return;
  showPromise();
  const cut = threshold();
  const above = searching ? hits.filter((hit) => hit.score >= cut) : [];
  const below = searching ? hits.filter((hit) => hit.score < cut).slice(0, NEAR) : [];
  const nothing = searching && !above.length;
  place($("results"), above, true);
  place($("misses"), !nothing || peeking ? below : [], false);
  $("near").hidden = !below.length || (nothing && !peeking);
  $("more").hidden = !searching || above.length < hits.length || hits.length < asked
    || asked >= about.limits.top || hits.length >= about.images;
  $("nothing").hidden = !nothing;
  if (nothing) {
    const best = hits[0].score;
    $("why").textContent = `The best of ${number(about.images)} images scores ${best.toFixed(2)}; `
      + `results need ${cut.toFixed(2)}.`;
    $("lower").textContent = about.thresholds
      ? `Accept ${percent(expected(best))} precision` : `Accept scores from ${best.toFixed(2)}`;
    $("peek").textContent = peeking ? "Hide the near misses" : "Show the near misses";
    $("peek").setAttribute("aria-expanded", peeking);
  }
  const all = above.length === hits.length && hits.length < about.images;
  $("status").textContent = !searching || nothing ? (nothing ? `Nothing relevant for “${shownFor}”` : "")
    : `${all ? "the first " : ""}${number(above.length)} relevant of ${number(about.images)} images`;
}

function fail(sentence) {
  hits = [];
  cards.clear();
  for (const id of ["results", "misses"]) $(id).replaceChildren();
  for (const id of ["start", "nothing", "near", "more"]) $(id).hidden = true;
  $("status").textContent = "";
  $("failed").hidden = false;
  $("error").textContent = sentence;
}

// ---- asking ----

async function get(address, signal) {
  const answer = await fetch(address, { signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer.");
  });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.detail);
  return content;
}

async function search(top = PAGE) {
  const query = $("query").value.trim();
  request?.abort();
  remember(query);
  if (!query) {
    [hits, shownFor] = [[], ""];
    return show();
  }
  const mine = request = new AbortController();
  try {
    const words = new URLSearchParams({ q: query, threshold: -1, top });
    const found = await get(`/api/search?${words}`, mine.signal);
    if (query !== shownFor) {
      cards.clear();
      peeking = false;
    }
    [hits, shownFor, asked] = [found.results, query, top];
    show();
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
}

/** The address says what is shown: it can be kept, sent, and gone back to. */
function remember(query) {
  const words = new URLSearchParams();
  if (query) words.set("q", query);
  if (about && Math.abs(wanted() - start()) > 0.002) words.set("p", wanted().toFixed(3));
  const address = words.size ? `?${words}` : location.pathname;
  const before = new URLSearchParams(location.search).get("q") ?? "";
  if (address === (location.search || location.pathname)) return;
  const typing = before && query.startsWith(before) || query && before.startsWith(query);
  history[before === query || typing || !before ? "replaceState" : "pushState"](null, "", address);
}

const start = () => about.thresholds ? about.thresholds.default : 0.3;

function recall() {
  const words = new URLSearchParams(location.search);
  $("query").value = words.get("q") ?? "";
  const p = parseFloat(words.get("p"));
  setWanted(Number.isFinite(p) ? p : start());
  return search();
}

function ask(text) {
  $("detail").close();
  $("query").value = text;
  scrollTo({ top: 0 });
  return search();
}

// ---- one image ----

async function openDetail(id) {
  let found;
  try {
    found = await get(`/api/similar/${id}?top=12`);
  } catch (error) {
    return fail(error.message);
  }
  $("large").parentElement.classList.remove("broken");
  picture($("large"), `${found.image.url}?large=true`, found.image.image);
  $("name").textContent = found.image.image;
  $("fits").hidden = !found.captions.length;
  const cut = threshold();
  $("captions").replaceChildren(...found.captions.slice(0, 6).map((caption) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = caption.score >= cut ? "above" : "below";
    button.append(caption.caption);
    const facts = document.createElement("span");
    facts.textContent = caption.score.toFixed(2) + (caption.precision == null ? "" : ` · ${percent(caption.precision)}`);
    button.append(facts);
    button.addEventListener("click", () => ask(caption.caption));
    item.append(button);
    return item;
  }));
  $("like").replaceChildren(...found.images.map(card));
  if (!$("detail").open) $("detail").showModal();
  $("detail").scrollTop = 0;
}

// ---- hands ----

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  search();
});
$("query").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(search, 120);
});
$("slider").addEventListener("input", show);
$("slider").addEventListener("change", () => remember(shownFor));
$("more").addEventListener("click", () => search(Math.min(asked + PAGE, about.limits.top)));
$("peek").addEventListener("click", () => {
  peeking = !peeking;
  show();
});
$("lower").addEventListener("click", () => {
  const best = hits[0].score;
  const [low, high] = ends();
  // one step of the slider less than what the best image has: that one is then in
  const step = (high - low) / 1000;
  setWanted((about.thresholds ? expected(best) : best) - step);
  show();
  remember(shownFor);
});
$("close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("click", (event) => event.target === $("detail") && $("detail").close());
addEventListener("popstate", recall);
addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, dialog")) {
    event.preventDefault();
    $("query").select();
    return;
  }
  const grid = event.target.closest?.(".grid");
  const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(grid), ArrowUp: -columns(grid) }[event.key];
  if (!grid || !move) return;
  const all = [...grid.querySelectorAll(".card")];
  const next = all[all.indexOf(event.target) + move];
  if (next) {
    event.preventDefault();
    next.focus();
  }
});

function columns(grid) {
  return grid ? getComputedStyle(grid).gridTemplateColumns.split(" ").length : 1;
}

// ---- start ----

try {
  about = await get("/api/about");
  $("size").textContent = `${number(about.images)} images are searched.`;
  const api = document.createElement("a");
  api.href = "/api/openapi.json";
  api.textContent = "JSON API";
  $("about").append(about.thresholds ? `Precision as measured on ${about.thresholds.measured_on} · ` : "", api);
  $("examples").replaceChildren(...about.examples.map((text) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => ask(text));
    return button;
  }));
  await recall();
} catch (error) {
  fail(error.message);
}
