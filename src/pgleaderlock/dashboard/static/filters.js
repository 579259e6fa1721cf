// The form above a list: what it filters by, the names that it suggests, and the address that remembers it.

import { ask, byId, h, later } from "./core.js";
import { colourAll } from "./colours.js";

const SUGGESTED_MAX = 500;
const TYPING_MS = 250;

// With the script a form needs no button: what is typed is followed.
export function takeForm() {
  const form = byId("finding");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.querySelector("button").hidden = true;
  return form;
}

export function remember(fields) {
  const query = new URLSearchParams(Object.entries(fields).filter(([, value]) => value));
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

// Gives the values of the fields, by their names; `changed` is called when one was typed. Until then a value is what the
// address says: a field drops line feeds, and the blanks around a name are dropped here.
export function filters(changed) {
  const form = takeForm();
  const given = new URLSearchParams(location.search);
  const values = () => Object.fromEntries([...form.elements].filter((field) => field.name).map((field) => [field.name, given.get(field.name) ?? field.value.trim()]));
  const typed = later(TYPING_MS, () => {
    remember(values());
    changed();
  });
  form.addEventListener("input", (event) => {
    given.delete(event.target.name);
    typed();
  });
  return values;
}

// What the fields ask of the API. A moment without a zone is in UTC, as the server reads it in an address; one that
// cannot be read, such as one that is being typed, is left out, and its field says so.
export function asked({ from, to, ...fields }) {
  return { ...fields, from_ms: momentMs("from", from), to_ms: momentMs("to", to) };
}

// Browsers read other forms too, each in its own way.
const MOMENT = /^\d{4}-\d\d-\d\d(?:([T ])\d\d:\d\d(?::\d\d(?:\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?$/;

function momentMs(name, text) {
  const [, timed, zone] = MOMENT.exec(text) ?? [];
  const ms = MOMENT.test(text) ? Date.parse(text.replace(" ", "T") + (timed && !zone ? "Z" : "")) : NaN;
  byId(`find-${name}`).setCustomValidity(text && !(ms >= 0) ? "A time such as 2026-11-15T03:00Z" : "");
  return ms >= 0 ? ms : null;
}

// The roles and nodes that there are.
export async function suggest() {
  const { leaders } = await ask("/v1/leaders", { limit: SUGGESTED_MAX }).catch(() => ({ leaders: [] }));
  const { nodes } = await ask("/v1/nodes").catch(() => ({ nodes: [] }));
  const options = (names) => [...new Set(names)].sort().map((name) => h("option", { value: name }));
  byId("list-of-roles").replaceChildren(...options(leaders.map((row) => row.role)));
  byId("list-of-nodes").replaceChildren(...options(nodes.map((node) => node.node_id)));
  colourAll(nodes.map((node) => node.node_id));
}
