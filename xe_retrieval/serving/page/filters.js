// Which images are searched, and in which order they are shown.

import { $, make, number } from "./words.js";

const FIELDS = ["folder", "since", "until", "filter"];
const KINDS = { text: "text", whole: "whole number", number: "number", date: 'day, as in "2020-06-01"' };

export const order = () => $("order").value;

/** What differs from the default, as parameters of the API and of the page's address. */
export function chosen() {
  const found = {};
  for (const id of FIELDS) if ($(id).value) found[id] = $(id).value;
  if (order() !== "best") found.order = order();
  return found;
}

export function choose(parameters) {
  for (const id of FIELDS) $(id).value = parameters.get(id) ?? "";
  $("order").value = parameters.get("order") === "date" ? "date" : "best";
  $("filters").open ||= Object.keys(chosen()).length > 0;
}

/** What is wrong with the filter, at its place; "" for nothing. */
export function wrong(sentence) {
  $("filter-error").textContent = sentence.replace(/^filter: /, "");
  $("filter-error").hidden = !sentence;
  $("filter").setAttribute("aria-invalid", Boolean(sentence));
  if (sentence) $("filters").open = true;
}

/** Lists the folders and columns; called again when the index has changed. */
export function describe(about) {
  const before = $("folder").value;
  const all = make("option", "", `everywhere (${number(about.images)})`);
  all.value = "";
  const options = about.folders.map(({ folder, images }) => {
    const depth = folder.split("/").length - 1;
    const option = make("option", "", `${"\u2003".repeat(depth)}${folder.split("/").at(-1)} (${number(images)})`);
    option.value = folder;
    return option;
  });
  $("folder").replaceChildren(all, ...(about.folders.length > 1 ? options : []));
  $("folder").value = before;
  if ($("folder").selectedIndex < 0) $("folder").value = "";
  $("folders").hidden = about.folders.length < 2;
  $("dates").hidden = !about.dates;
  for (const id of ["since", "until"]) [$(id).min, $(id).max] = about.dates ?? ["", ""];
  const columns = about.columns.map(({ column, type }) => `${column} (${KINDS[type]})`);
  $("columns").textContent = `Columns: ${columns.join(", ")}. Comparisons: == != < <= > >=, in ["a", "b"], like "a%"; and, or, not, parentheses.`;
  $("filters").hidden = false;
}

export function listen(changed) {
  for (const id of [...FIELDS, "order"]) $(id).addEventListener("change", changed);
}
