// Numbers as people read them, and elements made of them. Text from the server and the user is only
// ever set as textContent: no HTML injection.

export const $ = (id) => document.getElementById(id);

export const number = (n) => n.toLocaleString("en");
export const rounded = (n) => number(n < 10 ? +n.toFixed(1) : Math.round(n));

/** Never 0 % or 100 %: nothing is that certain. */
export function percent(share) {
  if (share < 0.01) return "< 1 %";
  return share > 0.99 ? "> 99 %" : `${Math.round(100 * share)} %`;
}

export function make(tag, className = "", ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

export function button(className, text, onClick) {
  const made = make("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}
