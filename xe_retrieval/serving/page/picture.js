// A picture as the query: chosen, dropped, pasted, or an image of the collection.

import { $, number } from "./words.js";

/** null, or {id: known to the server, file: not uploaded yet, name, url: of its thumbnail}. */
export let picture = null;

let changed = () => {};
let refused = () => {};

export function setPicture(next) {
  if (picture?.file) URL.revokeObjectURL(picture.url);
  picture = next;
  $("chip").hidden = !picture;
  if (!picture) return;
  $("chip-image").src = picture.url;
  $("chip-name").textContent = picture.name;
}

function take(file) {
  if (!file.type.startsWith("image/")) return refused(`${file.name || "That"} is no picture.`);
  const most = take.limit;
  if (file.size > most) return refused(`${file.name || "The picture"} has more than ${number(most >> 20)} MB.`);
  setPicture({ file, name: file.name || "pasted picture", url: URL.createObjectURL(file) });
  changed();
}

export function listen(limit, onChange, onRefusal) {
  take.limit = limit;
  [changed, refused] = [onChange, onRefusal];
  $("choose").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    if ($("file").files.length) take($("file").files[0]);
    $("file").value = "";
  });
  $("unchoose").addEventListener("click", () => {
    setPicture(null);
    $("query").focus();
    changed();
  });
  addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files][0];
    if (!file) return;
    event.preventDefault();
    take(file);
  });
  let inside = 0; // dragenter and dragleave come for every element
  const drag = (change) => (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    inside = Math.max(0, inside + change);
    document.body.classList.toggle("dragging", inside > 0);
  };
  addEventListener("dragenter", drag(1));
  addEventListener("dragover", drag(0));
  addEventListener("dragleave", drag(-1));
  addEventListener("drop", (event) => {
    inside = 0;
    document.body.classList.remove("dragging");
    const file = event.dataTransfer.files[0];
    if (!file) return;
    event.preventDefault();
    take(file);
  });
}
