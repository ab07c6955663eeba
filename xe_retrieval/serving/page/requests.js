// Requests to the API: waits and asks again when the server is busy, asks for a token when it wants one.

import { make } from "./words.js";

const RETRIES = 4;

const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

/** The parsed answer; throws an Error with the server's sentence and its `status`. */
export async function request(address, options = {}) {
  for (let attempt = 0; ; attempt++) {
    const answer = await fetch(address, options).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer.");
    });
    if (answer.status === 401) {
      await login();
      continue;
    }
    if (answer.status === 429 && attempt < RETRIES) {
      await wait((Number(answer.headers.get("retry-after")) || 1) * (0.5 + Math.random()));
      options.signal?.throwIfAborted();
      continue;
    }
    const text = answer.headers.get("content-type")?.startsWith("application/json")
      ? await answer.json() : await answer.text();
    if (!answer.ok) throw Object.assign(new Error(text.detail ?? "The request failed."), { status: answer.status });
    return text;
  }
}

let asking = null; // one dialog for all requests that wait for it

function login() {
  asking ??= new Promise((done) => {
    const token = Object.assign(make("input"), { id: "token", type: "password", autocomplete: "current-password", required: true });
    const title = Object.assign(make("h2", "", "This server asks for its token"), { id: "login-title" });
    const form = make("form", "detail", title, make("label", "", "Token ", token), make("button", "", "Continue"));
    if (document.cookie.includes("xe_token=")) title.after(make("p", "", "That was not the right one."));
    const dialog = Object.assign(make("dialog", "", form), { id: "login" });
    dialog.setAttribute("aria-labelledby", title.id);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      // A cookie, as images are loaded without other headers. Only for this path and this site.
      const path = location.pathname.replace(/[^/]*$/, "");
      const secure = location.protocol === "https:" ? "; Secure" : "";
      document.cookie = `xe_token=${encodeURIComponent(token.value)}; path=${path}; SameSite=Strict${secure}`;
      dialog.close();
    });
    dialog.addEventListener("close", () => { // by Escape, too: the request is made again and refused again
      dialog.remove();
      asking = null;
      done();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
