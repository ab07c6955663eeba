// The hair plot: for each query, how many images have at least a score. One line is this query's.

import { $, number } from "./words.js";

const [BOTTOM, TOP, RIGHT] = [40, 12, 20];

function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text != null) made.textContent = text;
  return made;
}

/** Draws it; `threshold` is the score that results need. */
export function draw(curve, threshold) {
  const WIDTH = $("plot").clientWidth || 680; // one unit is one pixel: labels stay readable
  const HEIGHT = Math.max(240, 0.45 * WIDTH);
  const LEFT = 32 + 8 * number(curve.images_in_all).length; // the widest label, and the name of the axis
  const lines = [curve.images, ...curve.others];
  const cut = Math.min(1, Math.max(-1, threshold)); // scores are cosines
  // Only the scores at which something changes for any of the lines, and the threshold.
  const changes = curve.scores.map((score, i) =>
    Math.abs(score - cut) < 0.01 || lines.some((l) => l[i] < curve.images_in_all && l[i] > 0));
  const first = Math.max(0, changes.indexOf(true) - 1);
  const last = Math.min(curve.scores.length - 1, changes.lastIndexOf(true) + 1);
  const [low, high] = [curve.scores[first], curve.scores[last]];
  const x = (score) => LEFT + (WIDTH - LEFT - RIGHT) * (score - low) / (high - low || 1);
  const most = Math.log10(curve.images_in_all + 1);
  const y = (images) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.log10(images + 1) / most);
  const path = (images) => curve.scores.slice(first, last + 1)
    .map((score, i) => `${i ? "L" : "M"}${x(score).toFixed(1)} ${y(images[first + i]).toFixed(1)}`).join("");

  const parts = [];
  const ticks = [curve.images_in_all];
  for (let images = 1; y(images) > y(ticks[0]) + 16; images *= 10) ticks.push(images);
  for (const images of ticks) {
    const at = y(images);
    parts.push(shape("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    parts.push(shape("text", { class: "tick", x: LEFT - 8, y: at + 4, "text-anchor": "end" }, number(images)));
  }
  const middle = (TOP + HEIGHT - BOTTOM) / 2;
  parts.push(shape("text", { class: "tick", transform: `translate(14 ${middle}) rotate(-90)`, "text-anchor": "middle" }, "images"));
  const step = [0.05, 0.1, 0.2, 0.5].find((size) => (high - low) / size * 44 < WIDTH - LEFT) ?? 1;
  for (let score = Math.ceil(low / step) * step; score <= high + 1e-9; score += step) {
    parts.push(shape("text", { class: "tick", x: x(score), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, (Math.abs(score) < 1e-9 ? 0 : score).toFixed(step < 0.1 ? 2 : 1)));
  }
  parts.push(shape("text", { class: "tick", x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "score"));
  for (const other of curve.others) parts.push(shape("path", { class: "hair", d: path(other) }));
  parts.push(shape("line", { class: "cut", x1: x(cut), x2: x(cut), y1: TOP, y2: HEIGHT - BOTTOM }));
  parts.push(shape("path", { class: "own", d: path(curve.images) }));
  $("plot").setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  $("plot").replaceChildren(...parts);
}
