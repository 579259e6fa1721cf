// What every page needs: elements, words for times, and the API. Text goes in as text: nothing here takes markup.

const DASH = "\u2013";

// --- Elements

// One element. Attributes that are null or false are left out; children are nodes or text.
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Writes only what differs: an unchanged text is no work for the browser, and no news for a screen reader.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// A name keeps its own direction of writing.
export const isolated = (name, attributes = {}) => h("bdi", { title: name, ...attributes }, String(name));

// --- Words. The pages that the server makes say the same (`pages.py`).

export function duration(ms) {
  if (ms === null || ms === undefined) return DASH;
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = ms / 1000;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  for (const [unit, length, below, belowLength] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    if (seconds >= length) {
      const rest = Math.floor((seconds % length) / belowLength);
      const whole = `${Math.floor(seconds / length)} ${unit}`;
      return rest ? `${whole} ${rest} ${below}` : whole;
    }
  }
  return `${Math.floor(seconds)} s`;
}

// How long ago, roughly: the larger unit only.
export const ago = (ms) => `${duration(ms).replace(/^(\d+ (?:d|h|min)) .*/, "$1")} ago`;

export const number = (value) =>
  value === null || value === undefined ? DASH : String(value).replace(/\B(?=(\d{3})+$)/g, "\u202f");

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

const two = (value) => String(value).padStart(2, "0");

export function clockText(ms) {
  const at = new Date(ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function dateText(ms) {
  const at = new Date(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

export const momentText = (ms) => `${dateText(ms)} ${clockText(ms)}`;

// Makes a <time> show a moment: `kind` is `moment` (date and time of day) or `clock` (time of day).
export function writeTime(element, ms, kind) {
  const iso = new Date(ms).toISOString();
  for (const [name, value] of [["datetime", iso], ["title", iso], ["data-time", kind]]) element.setAttribute(name, value);
  const date = kind === "moment" ? [h("span", { class: "date" }, dateText(ms)), " "] : [];
  element.replaceChildren(...date, clockText(ms));
}

// The server wrote UTC; the reader looks at a clock on a wall.
export function localTimes() {
  for (const element of document.querySelectorAll("time[data-time]")) {
    writeTime(element, Date.parse(element.dateTime), element.dataset.time);
  }
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  setText(byId("times"), `Times are in ${zone}. Point at one for the exact moment, in UTC.`);
}

// --- The server's clock: the browser's may be wrong, and ages are those that the server sees. An answer is a little old
// when it comes, so the furthest ahead is the nearest to the truth.

let skewMs = null;

export const now = () => Date.now() + (skewMs ?? 0);

// Before the first answer ages are those that the server wrote.
export const knowsNow = () => skewMs !== null;

export function setNow(serverMs) {
  if (!Number.isFinite(serverMs)) return;
  const seenMs = serverMs - Date.now();
  if (skewMs === null || seenMs > skewMs || seenMs < skewMs - 5000) skewMs = seenMs;
}

// --- The API

const EXACT = new Set(["epoch", "fencing_token"]);

// Epochs and tokens may be larger than the integers that JavaScript tells apart: those are kept as they were written.
export function parsed(text) {
  try {
    return JSON.parse(text, (key, value, context) =>
      EXACT.has(key) && typeof value === "number" && !Number.isSafeInteger(value) ? (context?.source ?? value) : value);
  } catch {
    return null;
  }
}

class Failure extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

const ASK_TIMEOUT_MS = 10_000;

export async function ask(path, fields = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const late = AbortSignal.timeout(ASK_TIMEOUT_MS);
  const answer = await fetch(query.size ? `${path}?${query}` : path, {
    headers: { accept: "application/json" },
    signal: signal ? AbortSignal.any([signal, late]) : late,
  });
  if (answer.status === 401) signIn();
  const body = parsed(await answer.text()) ?? {};
  if (!answer.ok) throw new Failure(answer.status, body.error ?? `the server answered ${answer.status}`);
  setNow(body.now_ms);
  document.querySelector("main > .error")?.remove(); // what the server could not say when it made the page
  return body;
}

// Every page of a list, up to a bound; the rest of the answer is that of the last page.
export async function askAll(path, list, max, fields = {}) {
  const found = [];
  let page;
  do {
    page = await ask(path, { ...fields, cursor: page?.next_cursor });
    found.push(...page[list]);
  } while (page.next_cursor && found.length < max);
  return { ...page, [list]: found };
}

// Terms are asked for by query: in a path, a role called `..` would be the folder above.
export const askTerms = (role, fields) => ask("/v1/leaders/terms", { role, ...fields });

// The login has ended: the server's own page says so, and leads back here.
export function signIn() {
  const here = location.pathname + location.search;
  location.assign(here === "/" ? "/sign-in" : `/sign-in?to=${encodeURIComponent(here)}`);
}

// Why nothing is shown, and what to do next; the page has both texts.
export function sayNothing(filtered) {
  const nothing = byId("nothing");
  setText(nothing, filtered ? nothing.dataset.filtered : nothing.dataset.empty);
}

// Runs one call at a time, and however often it is asked for meanwhile, one more afterwards.
export function oneAtATime(call) {
  let runs = false;
  let again = false;
  const run = async () => {
    again = runs;
    if (runs) return;
    runs = true;
    try {
      await call();
    } finally {
      runs = false;
      if (again) run();
    }
  };
  return run;
}

// Calls when it has not been asked for a while.
export function later(delayMs, call) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(call, delayMs, ...given);
  };
}

// Calls at most once in a while, however often it is asked.
export function soon(delayMs, call) {
  let timer = 0;
  return () => {
    timer ||= setTimeout(() => {
      timer = 0;
      call();
    }, delayMs);
  };
}

// Calls every so often, while the page is visible.
export function whileVisible(intervalMs, call) {
  setInterval(() => document.hidden || call(), intervalMs);
}
