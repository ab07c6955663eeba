// Requests to the API: waits and asks again when the server is busy, asks for a token when it wants one.

import { $ } from "./words.js";

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
    const again = document.cookie.includes("xe_token=");
    $("wrong").hidden = !again;
    $("login").showModal();
    $("login-form").addEventListener("submit", (event) => {
      event.preventDefault();
      // A cookie, as images are loaded without other headers. Only for this path and this site.
      const path = location.pathname.replace(/[^/]*$/, "");
      document.cookie = `xe_token=${encodeURIComponent($("token").value)}; path=${path}; SameSite=Strict`;
      $("token").value = "";
      $("login").close();
      asking = null;
      done();
    }, { once: true });
  });
  return asking;
}
