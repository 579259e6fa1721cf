// The page of the events: the newest on top, as they happen.

import { ask, byId, localTimes, now, number, plural, setAttribute, setText } from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { colourAll } from "./colours.js";
import { filled, offerMore, swap } from "./rows.js";
import { asked, filters, suggest } from "./filters.js";

const PAGE = 100;
const ROWS_MAX = 1000; // in the document; older ones are on further pages

const row = (event) => filled({ ...event, key: event.event_id }, now());

export function start() {
  const body = byId("events").tBodies[0];
  const mark = new Mark();
  let cursor = null;
  let held = []; // while it pauses
  let paused = false;
  let meanwhile = null; // from the stream while an answer was on its way, which may be older

  const reload = asking(mark, load);
  const filter = filters(reload);

  function wanted(event) {
    const { role, node, from_ms: fromMs, to_ms: toMs } = asked(filter());
    const inTime = event.at_ms >= (fromMs ?? 0) && event.at_ms <= (toMs ?? Infinity);
    return inTime && (!role || event.role === role) && (!node || event.node_id === node);
  }

  function sumUp() {
    byId("nothing").hidden = body.rows.length > 0;
    const waiting = held.length ? `, ${number(held.length)} more since you paused` : "";
    setText(byId("facts"), `${plural(body.rows.length, "event")} shown${waiting}`);
  }

  function add(events) {
    const known = new Set([...body.rows].map((each) => each.dataset.key));
    const fresh = events.filter((event) => !known.has(String(event.event_id)));
    fresh.forEach((event) => {
      const element = row(event);
      element.classList.add("fresh");
      // Events may come in another order than they happened in.
      const below = [...body.rows].find((each) => Number(each.dataset.key) < event.event_id);
      body.insertBefore(element, below ?? null);
    });
    while (body.rows.length > ROWS_MAX) body.rows[body.rows.length - 1].remove();
    sumUp();
  }

  function more(next) {
    cursor = next;
    offerMore("Older events", cursor !== null && body.rows.length < ROWS_MAX && asking(mark, older));
  }

  async function older() {
    if (cursor === null) return; // clicked twice
    const page = await ask("/v1/events", { ...asked(filter()), limit: PAGE, cursor });
    body.append(...page.events.map(row));
    more(page.next_cursor);
    sumUp();
  }

  async function load() {
    meanwhile = [];
    const page = await ask("/v1/events", { ...asked(filter()), limit: PAGE });
    colourAll(new Set(page.events.map((event) => event.node_id).filter((name) => name !== null)));
    swap(body, page.events.map(row));
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
