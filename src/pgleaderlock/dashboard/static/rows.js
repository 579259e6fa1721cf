// Rows. Their markup is the server's (`pages.py`): a page brings a blank row in a <template>, and this fills copies of it.
// A row that is there already is changed in place, so that the focus, a selection and the scroll position stay.

import { ago, byId, duration, h, knowsNow, number, setAttribute, setText, writeTime } from "./core.js";
import { colourOf } from "./colours.js";

// What changes by itself while time passes: an element has its moment in an attribute of this name.
const TICKING = {
  age: (ms, nowMs) => duration(nowMs - ms),
  ago: (ms, nowMs) => ago(nowMs - ms),
  left: (ms, nowMs) => (ms > nowMs ? duration(ms - nowMs) : "has run out"),
  until: (ms, nowMs) => (ms > nowMs ? `${duration(ms - nowMs)} left` : "any moment"),
};

const ticking = (kind) => (element, ms, nowMs) => {
  element.dataset[kind] = ms;
  element.textContent = TICKING[kind](ms, nowMs);
};

// How an element shows a value, by the name that the blank row gives it.
const FORMS = {
  group: () => {},
  text: (element, value) => (element.textContent = value),
  name: (element, value) => (element.textContent = element.title = value),
  link: (element, role) => (element.href = `/history?role=${encodeURIComponent(role)}`),
  lane: (element, role) => element.setAttribute("aria-label", `Terms of ${role}`),
  badge: (element, word) => {
    element.dataset.kind = word;
    element.textContent = word.replaceAll("_", " ");
  },
  number: (element, value) => (element.textContent = number(value)),
  duration: (element, ms) => (element.textContent = duration(ms)),
  age: ticking("age"),
  ago: ticking("ago"),
  left: ticking("left"),
  until: ticking("until"),
  moment: (element, ms) => writeTime(element, ms, "moment"),
  clock: (element, ms) => writeTime(element, ms, "clock"),
};

const isNone = (value) => value === null || value === undefined;

// A new row with these values. An element whose field has none is left out; so is a word for its absence otherwise.
export function filled(values, nowMs) {
  const row = byId("row").content.firstElementChild.cloneNode(true);
  const { fields } = row.dataset;
  delete row.dataset.fields;
  for (const field of fields.split(" ")) row.dataset[field] = values[field];
  for (const element of row.querySelectorAll("[data-missing]")) {
    if (!isNone(values[element.dataset.missing])) element.remove();
    delete element.dataset.missing;
  }
  for (const element of row.querySelectorAll("[data-field]")) {
    const { field, form } = element.dataset;
    delete element.dataset.field;
    delete element.dataset.form;
    if (isNone(values[field])) element.remove();
    else FORMS[form](element, values[field], nowMs);
  }
  for (const node of row.querySelectorAll(".node")) node.classList.add(`n${colourOf(node.textContent)}`);
  return row;
}

// Makes the rows of `body` the given ones, in their order. Rows are the same if their keys are.
export function swap(body, rows) {
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const wanted = new Set(rows.map((row) => row.dataset.key));
  for (const [key, row] of old) if (!wanted.has(key)) row.remove();
  rows.forEach((row, i) => {
    const known = old.get(row.dataset.key) ?? row;
    if (known !== row) morph(known, row);
    if (body.children[i] !== known) body.insertBefore(known, body.children[i] ?? null);
  });
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

// Makes `old` equal to `fresh`. What the script has put into an element with `data-keep` is its own.
function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) return setText(old, fresh.textContent);
  if (old.isEqualNode(fresh) || old.hasAttribute("data-keep")) return undefined;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) setAttribute(old, name, value);
  const [were, are] = [[...old.childNodes], [...fresh.childNodes]];
  are.forEach((child, i) => (were[i] ? morph(were[i], child) : old.append(child)));
  were.slice(are.length).forEach((child) => child.remove());
  return undefined;
}

// The button below a list, instead of the server's link; none without `ask`.
export function offerMore(text, ask) {
  byId("more")?.remove();
  if (!ask) return;
  const button = h("button", { type: "button" }, text);
  button.addEventListener("click", ask);
  byId("nothing").after(h("p", { id: "more", class: "more" }, button));
}

export function tick(root, nowMs) {
  if (!knowsNow()) return;
  for (const [kind, words] of Object.entries(TICKING)) {
    for (const element of root.querySelectorAll(`[data-${kind}]`)) setText(element, words(Number(element.dataset[kind]), nowMs));
  }
}
