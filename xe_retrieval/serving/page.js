// Typing queries the server; the slider filters results already loaded.
// Text from the server and the user is only ever set as textContent: no HTML injection.

const $ = (id) => document.getElementById(id);
const PAGE = 60; // results requested at a time
const NEAR = 12; // near misses shown

let about = null; // /api/about
let answer = null; // of the query that is shown; its results were loaded without a threshold
let hits = []; // these results, best first
let shownFor = ""; // the query of these results
let requested = PAGE; // how many results were requested for it
let peeking = false; // near misses are shown although nothing is relevant
let request = null; // AbortController of the search in flight
let timer = 0; // debounces typing

// ---- the slider, in hundredths: the minimum probability; the minimum score if not evaluated ----

const wanted = () => $("slider").valueAsNumber / 100;

function setWanted(value) {
  $("slider").value = Math.round(100 * value);
}

const measure = (hit) => about.calibration ? hit.probability : hit.score;
const passes = (hit) => measure(hit) >= wanted() - 1e-9;

const number = (n) => n.toLocaleString("en");
const rounded = (n) => number(n < 10 ? +n.toFixed(1) : Math.round(n));

/** Never 0 % or 100 %: nothing is that certain. */
function percent(share) {
  if (share < 0.01) return "< 1 %";
  return share > 0.99 ? "> 99 %" : `${Math.round(100 * share)} %`;
}

function expectation(results, wrong) {
  if (results < 0.05) return "hardly any query gets a result";
  const few = wrong < 0.05 ? "hardly any" : rounded(wrong);
  const kind = answer?.words ? "query of a few words" : "query";
  return `an average ${kind} gets about ${rounded(results)} results, ${few} of them wrong`;
}

function showPromise() {
  const bold = document.createElement("b");
  const rest = document.createElement("span");
  if (about.calibration) {
    const meaning = answer?.words ? about.calibration.words : about.calibration;
    const expect = meaning.expect[Math.round(100 * wanted()) - 1];
    bold.textContent = `at least ${percent(wanted())} likely to be relevant`;
    rest.textContent = ` · ${expectation(expect.results_per_query, expect.wrong_per_query)}`;
  } else {
    bold.textContent = `score at least ${wanted().toFixed(2)}`;
    rest.textContent = " · probability unknown: the model was not evaluated";
  }
  $("promise").replaceChildren(bold, rest);
  $("slider").setAttribute("aria-valuetext", bold.textContent + rest.textContent);
}

// ---- cards ----

function loadImage(img, url, name) {
  img.alt = name;
  img.loading = "lazy";
  img.decoding = "async";
  img.onerror = () => img.closest(".card, figure")?.classList.add("broken");
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
  const bold = document.createElement("b");
  facts.append(bold);
  if (hit.probability == null) {
    bold.textContent = hit.score.toFixed(2);
  } else {
    bold.textContent = percent(hit.probability);
    facts.title = "how likely this image is relevant to this query in this collection; "
      + `score ${hit.score.toFixed(2)}`;
  }
  button.append(frame, facts);
  item.append(button);
  loadImage(img, hit.url, hit.image);
  button.addEventListener("click", () => openDetail(hit.id));
  return item;
}

/** Cards by image id, reused so that thumbnails are not loaded again. */
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

// ---- rendering ----

function show() {
  const searching = Boolean(shownFor);
  $("start").hidden = searching;
  $("failed").hidden = true;
  $("sure").hidden = !about;
  if (!about) return;
  showPromise();
  const above = searching ? hits.filter(passes) : [];
  const below = searching ? hits.slice(above.length).slice(0, NEAR) : [];
  const nothing = searching && !above.length;
  place($("results"), above, true);
  place($("misses"), !nothing || peeking ? below : [], false);
  $("near").hidden = !below.length || (nothing && !peeking);
  $("more").hidden = !searching || above.length < hits.length || hits.length < requested
    || requested >= about.limits.top || hits.length >= about.images;
  $("nothing").hidden = $("choices").hidden = !nothing;
  showUnfamiliar(searching);
  if (nothing) {
    const best = measure(hits[0]);
    const shown = (value) => about.calibration ? percent(value) : value.toFixed(2);
    const means = about.calibration ? "is relevant with a probability of" : "scores";
    $("why").textContent = `The best of ${number(about.images)} images ${means} ${shown(best)}; `
      + `results need ${shown(wanted())}.`;
    $("why").hidden = !answer.familiar; // the next paragraph says why
    $("lower").hidden = Math.floor(100 * best) < $("slider").min;
    $("lower").textContent = `Accept ${about.calibration ? "" : "scores from "}${shown(best)}`;
    $("peek").textContent = peeking ? "Hide the near misses" : "Show the near misses";
    $("peek").setAttribute("aria-expanded", peeking);
  }
  const all = above.length === hits.length && hits.length < about.images;
  const found = nothing ? "Nothing relevant"
    : `${all ? "the first " : ""}${number(above.length)} relevant of ${number(about.images)} images`;
  $("status").textContent = searching ? `${found} for “${shownFor}”` : "";
}

/** The captions that the model knows and that are nearest to a query unlike them. */
function showUnfamiliar(searching) {
  const unfamiliar = searching && !answer.familiar;
  $("unfamiliar").hidden = !unfamiliar;
  $("strange").textContent = shownFor;
  $("suggestions").replaceChildren(...(unfamiliar ? answer.suggestions.map(suggestion) : []));
}

function suggestion(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => ask(text));
  return button;
}

function fail(sentence) {
  hits = [];
  cards.clear();
  for (const id of ["results", "misses"]) $(id).replaceChildren();
  for (const id of ["start", "nothing", "unfamiliar", "choices", "near", "more"]) $(id).hidden = true;
  $("status").textContent = "";
  $("failed").hidden = false;
  $("error").textContent = sentence;
}

// ---- requests and history ----

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
  updateAddress(query);
  if (!query) {
    [answer, hits, shownFor] = [null, [], ""];
    return show();
  }
  const mine = request = new AbortController();
  try {
    const parameters = new URLSearchParams({ q: query, threshold: -1, top });
    const found = await get(`/api/search?${parameters}`, mine.signal);
    if (query !== shownFor) {
      cards.clear();
      peeking = false;
    }
    [answer, hits, shownFor, requested] = [found, found.results, query, top];
    show();
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
}

/** Puts query and slider into the address, for bookmarks, links and the back button. */
function updateAddress(query) {
  const parameters = new URLSearchParams();
  if (query) parameters.set("q", query);
  if (about && Math.abs(wanted() - defaultWanted()) > 0.005) parameters.set("p", wanted().toFixed(2));
  const address = parameters.size ? `?${parameters}` : location.pathname;
  const before = new URLSearchParams(location.search).get("q") ?? "";
  if (address === (location.search || location.pathname)) return;
  // One history entry per query, not per keystroke or position of the slider.
  const typing = before && query.startsWith(before) || query && before.startsWith(query);
  history[before === query || typing || !before ? "replaceState" : "pushState"](null, "", address);
}

const defaultWanted = () => about.calibration?.default ?? 0.3;

/** The reverse of updateAddress. */
function readAddress() {
  const parameters = new URLSearchParams(location.search);
  $("query").value = parameters.get("q") ?? "";
  const p = parseFloat(parameters.get("p"));
  setWanted(Number.isFinite(p) ? p : defaultWanted());
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
  } catch (error) { // the image may be gone since the search: the other results still stand
    $("status").textContent = error.message;
    return;
  }
  $("large").parentElement.classList.remove("broken");
  loadImage($("large"), `${found.image.url}?large=true`, found.image.image);
  $("name").textContent = found.image.image;
  $("fits").hidden = !found.captions.length;
  $("captions").replaceChildren(...found.captions.slice(0, 6).map((caption) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = passes(caption) ? "above" : "below";
    button.append(caption.caption);
    const facts = document.createElement("span");
    facts.textContent = caption.probability == null ? caption.score.toFixed(2) : percent(caption.probability);
    facts.title = `score ${caption.score.toFixed(2)}`;
    button.append(facts);
    button.addEventListener("click", () => ask(caption.caption));
    item.append(button);
    return item;
  }));
  $("like").replaceChildren(...found.images.map(card));
  if (!$("detail").open) $("detail").showModal();
  $("detail").scrollTop = 0;
}

// ---- events ----

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
$("slider").addEventListener("change", () => updateAddress(shownFor));
$("more").addEventListener("click", () => search(Math.min(requested + PAGE, about.limits.top)));
$("peek").addEventListener("click", () => {
  peeking = !peeking;
  show();
});
$("lower").addEventListener("click", () => {
  setWanted(Math.floor(100 * measure(hits[0])) / 100);
  show();
  updateAddress(shownFor);
});
$("close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("click", (event) => event.target === $("detail") && $("detail").close());
addEventListener("popstate", readAddress);
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

function aboutCalibration() {
  const known = about.calibration;
  if (!known) return "";
  const words = known.words ? `, or to a few words if ${known.words.relevant}` : "";
  return `Probabilities as measured on ${known.measured_on}; an image is relevant if `
    + `${known.relevant}${words} · `;
}

try {
  about = await get("/api/about");
  $("size").textContent = `${number(about.images)} images are searched.`;
  const api = document.createElement("a");
  api.href = "/api/openapi.json";
  api.textContent = "JSON API";
  $("about").append(aboutCalibration(), api);
  [$("slider").min, $("slider").max] = about.calibration ? [1, 99] : [-100, 100];
  $("examples").replaceChildren(...about.examples.map(suggestion));
  await readAddress();
} catch (error) {
  fail(error.message);
}
