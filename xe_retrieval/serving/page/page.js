// Typing queries the server. The slider filters results already loaded, unless the server has to put
// the results into another order: then it asks again.

import { Cards, moveByArrows } from "./cards.js";
import * as curves from "./curve.js";
import * as details from "./detail.js";
import * as filters from "./filters.js";
import * as pictures from "./picture.js";
import { request } from "./requests.js";
import { defaultWanted, setWanted, showPromise, wanted } from "./slider.js";
import { $, button, number, percent } from "./words.js";

const PAGE = 60; // results requested at a time
const NEAR = 12; // near misses shown

let about = null; // /api/about
let answer = null; // to what is shown
let hits = []; // its results so far, best first
let places = new Map(); // image id → place in the order of the re-ranker, once it has answered
let shownFor = ""; // the words of these results
let peeking = false; // near misses are shown although nothing is relevant
let running = null; // AbortController of the search in flight
let timer = 0; // debounces typing

const words = () => $("query").value.trim();
const weight = () => $("weight").valueAsNumber / 100;
const alone = () => Boolean(answer) && answer.query === null; // a picture without words
/** Whether the server returns what is relevant now, instead of everything for the slider to filter. */
const cutByServer = (query, picture) =>
  Boolean(query) && (Boolean(picture) || filters.order() !== "best" || !about.calibration);

const measure = (hit) => about.calibration ? hit.probability : hit.score;
const passes = (hit) => measure(hit) >= wanted() - 1e-9;

// ---- rendering ----

/** What of the answer is relevant at this position of the slider, and how many in all. */
function relevant() {
  const at = Math.round(100 * wanted()) - 1;
  const wrong = answer.levels?.wrong[at];
  if (alone() || answer.cut) return { above: hits, below: answer.near_misses, total: answer.total, wrong };
  const above = hits.filter(passes);
  const below = hits.slice(above.length).slice(0, NEAR);
  const place = (hit) => places.get(hit.id) ?? places.size; // others keep their order, behind
  if (places.size) above.sort((a, b) => place(a) - place(b));
  return { above, below, total: answer.levels ? answer.levels.results[at] : null, wrong };
}

function show() {
  const searching = Boolean(answer);
  $("start").hidden = searching;
  $("failed").hidden = true;
  $("sure").hidden = !about || alone();
  $("mix").hidden = !(pictures.picture && words());
  if (!about) return;
  const { above, below, total, wrong } = searching ? relevant() : { above: [], below: [] };
  showPromise(about, answer, searching && answer.levels ? { total, wrong } : null);
  const nothing = searching && !above.length;
  cards.place($("results"), above, !alone());
  cards.place($("misses"), !nothing || peeking ? below : [], false);
  $("near").hidden = !below.length || (nothing && !peeking);
  const all = above.length === hits.length;
  $("more").hidden = !searching || !all || (total !== null && total <= hits.length) || !hits.length;
  $("nothing").hidden = $("choices").hidden = !nothing;
  $("tools").hidden = !searching || nothing;
  $("show-curve").hidden = !shownFor;
  showUnfamiliar(searching);
  if (nothing) showNothing(below);
  $("status").textContent = searching ? status(above.length, total) : "";
  if (searching && !nothing) showExports();
}

function status(count, total) {
  const images = `${number(about.images)} images`;
  if (alone()) return `${number(total ?? count)} of ${images}, the most alike first`;
  const of = shownFor ? ` for “${shownFor}”` : "";
  if (!count) return `Nothing relevant${of}`;
  const found = total === null ? `more than ${number(count - 1)}` : number(total);
  return `${found} relevant of ${images}${of}`;
}

function showNothing(below) {
  const best = answer.cut || !hits.length ? (about.calibration ? answer.best_probability : answer.best_score) : measure(hits[0]);
  const shown = (value) => about.calibration ? percent(value) : value.toFixed(2);
  const means = about.calibration ? "is relevant with a probability of" : "scores";
  $("why").hidden = !answer.familiar; // the next paragraph says why
  $("why").textContent = best === null ? "No image is in this folder, of these dates and passes the filter."
    : `The best of ${number(about.images)} images ${means} ${shown(best)}; results need ${shown(wanted())}.`;
  $("lower").hidden = best === null || Math.floor(100 * best) < $("slider").min;
  $("peek").hidden = !below.length;
  if (best === null) return;
  $("lower").textContent = `Accept ${about.calibration ? "" : "scores from "}${shown(best)}`;
  $("lower").dataset.best = best;
  $("peek").textContent = peeking ? "Hide the near misses" : "Show the near misses";
  $("peek").setAttribute("aria-expanded", peeking);
}

/** The captions that the model knows and that are nearest to a query unlike them. */
function showUnfamiliar(searching) {
  const unfamiliar = searching && !answer.familiar;
  $("unfamiliar").hidden = !unfamiliar;
  $("strange").textContent = shownFor;
  $("suggestions").replaceChildren(...(unfamiliar ? answer.suggestions.map(suggestion) : []));
}

const suggestion = (text) => button("", text, () => ask(text));

function showExports() {
  for (const format of ["csv", "json"]) $(`export-${format}`).href = exported(format);
}

function exported(format) {
  const parameters = parametersOf(shownFor, answer.like);
  if (alone()) parameters.set("top", hits.length);
  else parameters.set(about.calibration ? "min_probability" : "threshold", wanted().toFixed(2));
  parameters.set("format", format);
  return `api/export?${parameters}`;
}

function fail(sentence) {
  [answer, hits, shownFor] = [null, [], ""];
  cards.clear();
  for (const id of ["results", "misses"]) $(id).replaceChildren();
  for (const id of ["start", "nothing", "unfamiliar", "choices", "near", "more", "tools"]) $(id).hidden = true;
  $("status").textContent = "";
  $("failed").hidden = false;
  $("error").textContent = sentence;
}

// ---- requests and history ----

function parametersOf(query, like) {
  const parameters = new URLSearchParams(filters.chosen());
  if (query) parameters.set("q", query);
  if (like) parameters.set("like", like);
  if (like && query) parameters.set("weight", weight());
  return parameters;
}

/** The first results, or those from `offset` on. */
async function load(query, offset, signal) {
  const picture = pictures.picture;
  const parameters = parametersOf(query, picture?.id);
  const cut = cutByServer(query, picture);
  parameters.set("top", PAGE);
  if (offset) parameters.set("offset", offset);
  if (cut) {
    parameters.set(about.calibration ? "min_probability" : "threshold", wanted().toFixed(2));
    parameters.set("near", NEAR);
  } else {
    parameters.set("threshold", -1);
  }
  if (query) parameters.set("levels", true);
  if (picture?.file && !picture.id) {
    parameters.delete("like");
    if (query) parameters.set("weight", weight());
    const sent = { method: "POST", body: picture.file, headers: { "content-type": picture.file.type }, signal };
    const found = await request(`api/search?${parameters}`, sent);
    picture.id = found.like;
    return { ...found, cut };
  }
  try {
    return { ...(await request(`api/search?${parameters}`, { signal })), cut };
  } catch (error) {
    if (error.status !== 404 || !picture?.file) throw error;
    picture.id = null; // the server has forgotten the picture: it is sent again
    return load(query, offset, signal);
  }
}

async function search() {
  const query = words();
  running?.abort();
  updateAddress(query);
  if (!query && !pictures.picture) {
    filters.wrong("");
    [answer, hits, shownFor] = [null, [], ""];
    return show();
  }
  const mine = running = new AbortController();
  document.body.setAttribute("aria-busy", "true");
  try {
    const found = await load(query, 0, mine.signal);
    if (query !== shownFor || found.like !== answer?.like) peeking = false;
    cards.clear();
    filters.wrong("");
    [answer, hits, shownFor, places] = [found, found.results, query, new Map()];
    if (found.version !== about.version) {
      const before = Boolean(about.calibration);
      await describe();
      if (Boolean(about.calibration) !== before) { // the slider means something else now
        setWanted(defaultWanted(about));
        return search();
      }
    }
    show();
    rerank(query, mine.signal);
  } catch (error) {
    if (error.status === 422 && error.message.startsWith("filter: ")) filters.wrong(error.message); // earlier results stand
    else if (error.name !== "AbortError") fail(error.message);
  } finally {
    if (mine === running) document.body.removeAttribute("aria-busy");
  }
}

/** Asks the re-ranker after the first results are shown, which it only puts into another order. */
async function rerank(query, signal) {
  if (!about.rerank || !query || answer.cut) return;
  const parameters = parametersOf(query, null);
  parameters.delete("order");
  try {
    const found = await request(`api/rerank?${parameters}`, { signal });
    places = new Map(found.results.map((hit, place) => [hit.id, place]));
    show();
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
}

async function showMore() {
  const mine = running = new AbortController();
  $("more").disabled = true;
  try {
    const found = await load(shownFor, hits.length, mine.signal);
    const known = new Set(hits.map((hit) => hit.id));
    answer = { ...answer, near_misses: found.near_misses, total: found.total };
    hits = [...hits, ...found.results.filter((hit) => !known.has(hit.id))];
    show();
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  } finally {
    $("more").disabled = false;
  }
}

/** Puts what is asked for into the address, for bookmarks, links and the back button. */
function updateAddress(query) {
  const picture = pictures.picture;
  const parameters = parametersOf(query, picture?.file ? null : picture?.id);
  if (about && Math.abs(wanted() - defaultWanted(about)) > 0.005) parameters.set("p", wanted().toFixed(2));
  const address = parameters.size ? `?${parameters}` : location.pathname;
  const old = new URLSearchParams(location.search);
  const before = old.get("q") ?? "";
  if (address === (location.search || location.pathname)) return;
  // One history entry per query, not per keystroke or position of the slider.
  const typing = before && query.startsWith(before) || query && before.startsWith(query);
  const same = (before === query || typing || !before) && old.get("like") === parameters.get("like");
  history[same ? "replaceState" : "pushState"](null, "", address);
}

/** The reverse of updateAddress. */
async function readAddress() {
  const parameters = new URLSearchParams(location.search);
  $("query").value = parameters.get("q") ?? "";
  const p = parseFloat(parameters.get("p"));
  setWanted(Number.isFinite(p) ? p : defaultWanted(about));
  const w = parseFloat(parameters.get("weight"));
  $("weight").value = Number.isFinite(w) ? 100 * w : 50;
  filters.choose(parameters);
  const like = parameters.get("like");
  if (!like) pictures.setPicture(null);
  else if (like !== pictures.picture?.id) {
    const image = await request(`api/image/${encodeURIComponent(like)}`).catch(() => null);
    pictures.setPicture(image && { id: image.id, name: image.image, url: image.url });
  }
  return search();
}

function ask(text) {
  $("detail").close();
  pictures.setPicture(null);
  $("query").value = text;
  scrollTo({ top: 0 });
  return search();
}

function askLike(image) {
  pictures.setPicture({ id: image.id, name: image.image, url: image.url });
  $("query").value = "";
  scrollTo({ top: 0 });
  return search();
}

// ---- the curve, and the list of results ----

async function showCurve() {
  try {
    const curve = await request(`api/curve?${new URLSearchParams({ q: shownFor })}`);
    const threshold = curve.thresholds ? curve.thresholds[Math.round(100 * wanted()) - 1] : wanted();
    $("curve").showModal(); // drawn as wide as it is shown
    curves.draw(curve, threshold);
    $("curve-words").textContent = `“${shownFor}”`;
    $("curve-note").textContent = `Each line is one query: how many of ${number(about.images)} images have at least `
      + `a score. Blue is yours${curve.others.length ? ", grey are captions that the model knows" : ""}; `
      + `the dashed line is what results need now, ${threshold.toFixed(2)}.`;
  } catch (error) {
    say(error.message);
  }
}

async function copyPaths() {
  try {
    const paths = await request(exported("txt"));
    await navigator.clipboard.writeText(paths);
    $("copied").textContent = `${number(paths.split("\n").length - 1)} paths copied`;
  } catch (error) {
    $("copied").textContent = error.status ? error.message : "The browser does not allow to copy here.";
  }
  setTimeout(() => { $("copied").textContent = ""; }, 4000);
}

// ---- events ----

/** What went wrong beside the search: its results still stand. */
const say = (sentence) => { $("status").textContent = sentence; };
const openDetail = details.listen(ask, askLike, passes, say);
const cards = new Cards(openDetail);
const later = (change = search) => {
  clearTimeout(timer);
  timer = setTimeout(change, 120);
};

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  search();
});
$("query").addEventListener("input", () => later());
$("weight").addEventListener("input", () => later());
$("slider").addEventListener("input", () => {
  show();
  if (answer?.cut) later();
});
$("slider").addEventListener("change", () => updateAddress(shownFor));
$("more").addEventListener("click", showMore);
$("show-curve").addEventListener("click", showCurve);
$("export-paths").addEventListener("click", copyPaths);
$("peek").addEventListener("click", () => {
  peeking = !peeking;
  show();
});
$("lower").addEventListener("click", () => {
  setWanted(Math.floor(100 * $("lower").dataset.best) / 100);
  if (answer.cut) return search();
  show();
  updateAddress(shownFor);
});
addEventListener("popstate", readAddress);
addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, select, dialog")) {
    event.preventDefault();
    $("query").select();
    return;
  }
  moveByArrows(event);
});

// ---- start ----

/** What the page says of the collection; asked for again when the server has loaded another index or evaluation. */
async function describe() {
  about = await request("api/about");
  $("size").textContent = `${number(about.images)} images are searched. Describe one, or search by a picture.`;
  const known = about.calibration;
  const few = known?.words ? `, or to a few words if ${known.words.relevant}` : "";
  $("measured").textContent = known
    ? `Probabilities as measured on ${known.measured_on}; an image is relevant if ${known.relevant}${few} · ` : "";
  if (about.audit?.queries) $("measured").append(`The index finds ${percent(about.audit.recall_at_10)} of the ten nearest · `);
  [$("slider").min, $("slider").max] = known ? [1, 99] : [-100, 100];
  $("examples").replaceChildren(...about.examples.map(suggestion));
  filters.describe(about);
}

try {
  await describe();
  filters.listen(search);
  pictures.listen(about.limits.picture, search, say);
  await readAddress();
} catch (error) {
  fail(error.message);
}
