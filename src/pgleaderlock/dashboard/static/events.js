// The page of the events: the newest on top, as they happen.

import { ask, badge, byId, filterOf, h, later, localTimes, moment, number, plural, roleLink, setAttribute, setText } from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { cell, nodeElement } from "./nodes.js";
import { colourAll } from "./colours.js";
import { suggest } from "./history.js";

const PAGE = 100;
const ROWS_MAX = 1000; // in the document; older ones are on further pages

const row = (event) =>
  h("tr", { "data-id": event.event_id },
    cell("when", "At", moment(event.at_ms)),
    cell("why", "What", badge(event.kind)),
    cell("name role", "Role", event.role === null ? "" : roleLink(event.role)),
    cell("name node", "Node", event.node_id === null ? "" : nodeElement(event.node_id)),
    cell("num", "Epoch", event.epoch === null ? "" : number(event.epoch)),
    cell("detail", "Detail", event.detail === null ? "" : h("bdi", {}, event.detail)),
  );

export function start() {
  const body = byId("events").tBodies[0];
  const mark = new Mark();
  const [role, node] = [byId("find-role"), byId("find-node")];
  let cursor = null;
  let held = []; // while it pauses
  let paused = false;
  let meanwhile = null; // told while an answer was on its way, which may be older

  const [roleWanted, nodeWanted] = [filterOf(role), filterOf(node)];
  const filter = () => ({ role: roleWanted(), node: nodeWanted() });

  function wanted(event) {
    const { role: roleName, node: nodeName } = filter();
    return (!roleName || event.role === roleName) && (!nodeName || event.node_id === nodeName);
  }

  function sumUp() {
    byId("nothing").hidden = body.rows.length > 0;
    const waiting = held.length ? `, ${number(held.length)} more since you paused` : "";
    setText(byId("facts"), `${plural(body.rows.length, "event")} shown${waiting}`);
  }

  function add(events) {
    const known = new Set([...body.rows].slice(0, ROWS_MAX).map((each) => each.dataset.id));
    const fresh = events.filter((event) => !known.has(String(event.event_id)));
    fresh.forEach((event) => {
      const element = row(event);
      element.classList.add("fresh");
      // Events may be told in another order than they happened in.
      const below = [...body.rows].find((each) => Number(each.dataset.id) < event.event_id);
      body.insertBefore(element, below ?? null);
    });
    while (body.rows.length > ROWS_MAX) body.rows[body.rows.length - 1].remove();
    sumUp();
  }

  function more(next) {
    cursor = next;
    byId("more")?.remove();
    if (cursor === null || body.rows.length >= ROWS_MAX) return;
    const button = h("button", { type: "button" }, "Older events");
    button.addEventListener("click", asking(mark, older));
    byId("nothing").after(h("p", { id: "more", class: "more" }, button));
  }

  async function older() {
    if (cursor === null) return; // clicked twice
    const page = await ask("/v1/events", { ...filter(), limit: PAGE, cursor });
    body.append(...page.events.map(row));
    more(page.next_cursor);
    sumUp();
  }

  async function load() {
    meanwhile = [];
    const page = await ask("/v1/events", { ...filter(), limit: PAGE });
    colourAll(new Set(page.events.map((event) => event.node_id).filter((name) => name !== null)));
    body.replaceChildren(...page.events.map(row));
    held = [];
    more(page.next_cursor);
    const known = new Set(page.events.map((event) => event.event_id));
    const missing = meanwhile.filter((event) => wanted(event) && !known.has(event.event_id));
    meanwhile = null;
    if (paused) held = missing;
    else add(missing);
    sumUp();
    localTimes();
  }

  const reload = asking(mark, load);
  const search = later(250, () => {
    const query = new URLSearchParams(Object.entries(filter()).filter(([, value]) => value));
    history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
    reload();
  });
  for (const field of [role, node]) field.addEventListener("input", search);
  byId("finding").addEventListener("submit", (event) => event.preventDefault());
  byId("finding").querySelector("button").hidden = true;
  const pause = byId("pause");
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    setAttribute(pause, "aria-pressed", paused);
    setText(pause, paused ? "Go on" : "Pause");
    if (!paused) add(held.splice(0));
    sumUp();
  });
  suggest();
  reload();
  new Stream(
    mark,
    {
      event: (event) => {
        meanwhile?.push(event);
        if (!wanted(event)) return;
        if (paused) held = [...held, event].slice(-ROWS_MAX);
        else add([event]);
        sumUp();
      },
      reload,
    },
    reload,
  );
}
