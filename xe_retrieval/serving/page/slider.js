// The slider, in hundredths: the minimum probability; the minimum score if the model was not evaluated.

import { $, make, percent, rounded } from "./words.js";

export const wanted = () => $("slider").valueAsNumber / 100;

export function setWanted(value) {
  $("slider").value = Math.round(100 * value);
}

export const defaultWanted = (about) => about.calibration?.default ?? 0.3;

/** What to expect of an average query: nothing has been asked yet. */
function average(about, words) {
  const meaning = words ? about.calibration.words : about.calibration;
  const { results_per_query: results, wrong_per_query: wrong } = meaning.expect[Math.round(100 * wanted()) - 1];
  if (results < 0.05) return "hardly any query gets a result";
  const few = wrong < 0.05 ? "hardly any" : rounded(wrong);
  return `an average query gets about ${rounded(results)} results, ${few} of them wrong`;
}

/** What to expect of this query: the sum of what each result lacks to certainty. */
function own({ total, wrong }) {
  if (!total) return "no result is that sure";
  const results = total === 1 ? "1 result" : `${rounded(total)} results`;
  if (wrong < 0.05) return `${results}, hardly any of them wrong`;
  return `${results}, about ${rounded(wrong)} of them expected to be wrong`;
}

/** `found` is {total, wrong} of the query at this position of the slider, if there is one. */
export function showPromise(about, answer, found) {
  const bold = make("b");
  const rest = make("span");
  if (about.calibration) {
    bold.textContent = `each at least ${percent(wanted())} sure`;
    rest.textContent = ` · ${found ? own(found) : average(about, answer?.words)}`;
  } else {
    bold.textContent = `score at least ${wanted().toFixed(2)}`;
    rest.textContent = " · probability unknown: the model was not evaluated";
  }
  $("promise").replaceChildren(bold, rest);
  $("slider").setAttribute("aria-valuetext", bold.textContent + rest.textContent);
}
