// The page of the leaders: every role in memory, the rows that are in sight in the document, the news from the stream.

import {
  ago, ask, byId, duration, h, isolated, localTimes, now, number, plural, sayNothing, setAttribute, setText, soon,
  whileVisible,
} from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { Timeline } from "./timeline.js";
import { colourAll, colourOf } from "./colours.js";
import { filled, swap, tick } from "./rows.js";
import { takeForm } from "./filters.js";

const ROLES_MAX = 20_000;
const PAGE = 1000;
const OVERSCAN = 6; // rows beyond the edge, for the keyboard
const LEGEND_MAX = 16;
const REMEDIES_MAX = 5;
const ROLES_TOGETHER = 5;
const DEFAULT_NAMESPACE = "pgleaderlock";

const roles = new Map(); // key -> row, as the API gives it, and when its leader was last heard
const nodes = new Map(); // session -> node
let order = []; // what is shown: filtered, and what is wrong first
let nodesMs = 0; // when they were as they are here
let known = false; // which roles there are: none is an answer, too
let mark, timeline;

const keyOf = (row) => `${row.namespace}\n${row.role}`;

// `asked`: it was asked for, and the stream may have brought something newer while the answer was on its way.
function takeRole(row, nowMs, asked = false) {
  const key = keyOf(row);
  const before = roles.get(key);
  if (asked && before?.toldMs > nowMs) return;
  const heardMs = row.heartbeat_age_ms === null ? (before?.heardMs ?? null) : nowMs - row.heartbeat_age_ms;
  roles.set(key, { ...row, key, heardMs, toldMs: nowMs, find: `${row.role}\n${row.leader ?? ""}\n${row.namespace}`.toLowerCase() });
  if (!before || before.epoch !== row.epoch || before.leader !== row.leader || before.state !== row.state) timeline.outdate(key);
}

// A heartbeat is a node's, whatever the number of its roles: the news of a few nodes keep a thousand rows fresh.
function takeNodes({ nodes: list, now_ms: nowMs }, asked = false) {
  if (asked && nodesMs > nowMs) return;
  nodesMs = nowMs;
  const heard = new Map();
  nodes.clear();
  for (const node of list) {
    nodes.set(node.session_id, node);
    const heardMs = nowMs - node.heartbeat_age_ms;
    if (node.live && !(heard.get(node.node_id) > heardMs)) heard.set(node.node_id, heardMs);
  }
  for (const row of roles.values()) {
    const heardMs = heard.get(row.leader);
    // The stream sends a late one again when it is heard.
    if (row.heartbeat === "ok" && heardMs > row.heardMs) row.heardMs = heardMs;
  }
}

// --- The order, and the sentence that sums it up

function arrange() {
  const wanted = byId("find").value.trim().toLowerCase();
  const all = [...roles.values()];
  order = wanted ? all.filter((row) => row.find.includes(wanted)) : all;
  const byName = (a, b) => (a.role < b.role ? -1 : a.role > b.role ? 1 : a.namespace < b.namespace ? -1 : 1);
  order.sort((a, b) => a.rank - b.rank || byName(a, b));
  sumUp(all, wanted);
}

// How many roles are in which state, the worst first; when the news stop, nothing is known.
function sumUp(all, wanted) {
  if (!known) return;
  const which = plural(all.length, "role");
  const troubled = all.filter((row) => row.state !== "acting").sort((a, b) => a.rank - b.rank);
  const counts = new Map();
  for (const row of troubled) counts.set(row.label, (counts.get(row.label) ?? 0) + 1);
  const wrong = [...counts].map(([label, count]) => (counts.size > 1 ? `${number(count)} ${label}` : label));
  let sentence = all.length > 1 ? `All ${which} acting` : "The one role is acting";
  if (!all.length) sentence = "No roles";
  const who = all.length > 1 ? `${number(troubled.length)} of ${which} not acting` : "The one role is not acting";
  if (wrong.length) sentence = `${who}: ${wrong.join(" \u00b7 ")}`;
  const unknown = mark.staleMs !== null;
  if (unknown) sentence = `Unknown: no data for ${duration(now() - mark.staleMs)}`;
  setText(byId("state"), sentence);
  setAttribute(byId("state"), "class", unknown ? "bad" : (troubled[0]?.mood ?? (all.length ? "well" : "none")));
  document.title = `${unknown ? "(?) " : troubled.length ? `(${troubled.length}!) ` : ""}Leaders \u00b7 pgleaderlock`;
  advise(unknown ? [] : troubled);
  byId("nothing").hidden = order.length > 0;
  sayNothing(wanted);
  const last = all.reduce((a, b) => ((b.last_change?.at_ms ?? 0) > (a?.last_change?.at_ms ?? 0) ? b : a), null);
  const live = [...nodes.values()].filter((node) => node.live).length;
  byId("facts").replaceChildren(
    ...[
      nodes.size ? `${plural(live, "live node")}` : "",
      wanted ? `${plural(order.length, "role")} shown` : "",
      last?.last_change ? h("span", {}, `last change ${ago(now() - last.last_change.at_ms)}: `, isolated(last.role)) : "",
    ].filter(Boolean).map((fact) => h("span", {}, fact)),
  );
}

// Why nobody may act for which roles, and what to run next: the worst few. A node that was lost is one reason.
function advise(troubled) {
  const causes = new Map();
  for (const row of troubled) {
    const said = `${row.why}\n${row.command}`;
    causes.set(said, [...(causes.get(said) ?? []), row]);
  }
  const lines = [...causes.values()].slice(0, REMEDIES_MAX).map((rows) =>
    h("li", { "data-mood": rows[0].mood }, h("strong", {}, ...names(rows)), h("span", {}, rows[0].why), h("code", {}, rows[0].command)));
  const more = [...causes.values()].slice(REMEDIES_MAX).flat().length;
  if (more) lines.push(h("li", {}, `and ${plural(more, "more role")}`));
  const text = troubled.map((row) => `${row.role} ${row.why} ${row.command}`).join("\n");
  if (byId("remedies").dataset.text === text) return;
  byId("remedies").dataset.text = text;
  byId("remedies").replaceChildren(...lines);
}

function names(rows) {
  const shown = rows.slice(0, ROLES_TOGETHER).flatMap((row, i) => [i ? ", " : "", isolated(row.role)]);
  return [...shown, rows.length > ROLES_TOGETHER ? ` and ${number(rows.length - ROLES_TOGETHER)} more` : ""];
}

function legend() {
  const led = new Map();
  for (const row of roles.values()) if (row.leader !== null) led.set(row.leader, (led.get(row.leader) ?? 0) + 1);
  for (const node of nodes.values()) if (node.live && !led.has(node.node_id)) led.set(node.node_id, 0);
  const names = [...led.keys()].sort();
  colourAll(names);
  const shown = names.slice(0, LEGEND_MAX).map((name) => {
    const words = `Show what ${name} leads`;
    const button = h("button", { type: "button", class: `node n${colourOf(name)}`, title: words }, h("i", { class: "chip" }), isolated(name), h("small", {}, number(led.get(name))));
    button.addEventListener("click", () => find(byId("find").value === name ? "" : name));
    return button;
  });
  if (names.length > LEGEND_MAX) shown.push(h("a", { href: "/nodes" }, `and ${names.length - LEGEND_MAX} more`));
  const text = names.map((name) => `${name} ${led.get(name)}`).join("\n");
  if (byId("legend").dataset.text !== text) {
    byId("legend").dataset.text = text;
    byId("legend").replaceChildren(...shown);
    byId("legend").hidden = names.length === 0;
  }
}

function find(text) {
  if (byId("find").value !== text) byId("find").value = text;
  arrange();
  draw();
}

// What a row shows. When the news stop, ages stand still too.
function element(row, index) {
  const found = filled(
    {
      ...row,
      space: row.namespace === DEFAULT_NAMESPACE ? null : row.namespace,
      troubled_ms: row.state === "acting" || row.state === "waiting" ? null : row.state_since_ms,
      heard_ms: row.heartbeat_age_ms === null ? null : row.heardMs,
      late: row.heartbeat === "late" || null,
      leased: row.hold === "lease" || null,
      changed: row.last_change?.kind,
      changed_ms: row.last_change?.at_ms,
      after: row.last_change?.reason,
    },
    mark.staleMs ?? now(),
  );
  setAttribute(found, "aria-rowindex", index + 2);
  return found;
}

// --- The rows in sight. They are as high as the style sheet says, so that their places are known without them.

let rowPx = 0;
let lanePx = 0;

function measure() {
  rowPx = parseFloat(getComputedStyle(byId("roles")).getPropertyValue("--row-px"));
  lanePx = byId("axis").clientWidth;
}

function inSight() {
  const box = byId("rows").getBoundingClientRect();
  const first = Math.max(0, Math.floor(-box.top / rowPx) - OVERSCAN);
  const last = Math.min(order.length, Math.ceil((innerHeight - box.top) / rowPx) + OVERSCAN);
  return [Math.min(first, Math.max(0, order.length - 1)), Math.max(last, first)];
}

// `everything`: what is there already may have changed; otherwise the page was only scrolled.
function draw(everything = true) {
  if (!known) return; // the server's rows are all there is to say
  const rows = byId("rows");
  setAttribute(byId("roles"), "data-script", "yes");
  if (everything) measure();
  const [first, last] = inSight();
  const shown = order.slice(first, last);
  rows.style.height = `${order.length * rowPx}px`;
  rows.style.paddingTop = `${first * rowPx}px`;
  const there = new Map(everything ? [] : [...rows.children].map((row) => [row.dataset.key, row]));
  swap(rows, shown.map((row, i) => there.get(row.key) ?? element(row, first + i)));
  if (everything) {
    setAttribute(byId("roles"), "aria-rowcount", order.length + 1);
    timeline.drawAxis();
  }
  shown.forEach((row, i) => {
    if (!there.has(row.key)) timeline.draw(rows.children[i].lastChild.firstChild, row, lanePx, mark.staleMs);
  });
  timeline.want(shown);
}

let due = 0;
let dueEverything = false;

function drawSoon(everything = true) {
  dueEverything ||= everything;
  due ||= requestAnimationFrame(() => {
    const all = dueEverything;
    due = 0;
    dueEverything = false;
    draw(all);
  });
}

// --- Loading and news

async function load() {
  const found = new Set();
  let cursor = null;
  let beganMs = null;
  do {
    const page = await ask("/v1/leaders", { limit: PAGE, cursor });
    beganMs ??= page.now_ms;
    for (const row of page.leaders) {
      takeRole(row, page.now_ms, true);
      found.add(keyOf(row));
    }
    cursor = page.next_cursor;
  } while (cursor && roles.size < ROLES_MAX);
  for (const [key, row] of roles) if (!found.has(key) && row.toldMs <= beganMs) roles.delete(key);
  if (!cursor) byId("more")?.remove();
  known = true;
  takeNodes(await ask("/v1/nodes", { limit: PAGE }), true);
  legend();
  arrange();
  draw();
  localTimes();
}

const arrangeSoon = soon(30, () => {
  legend();
  arrange();
  drawSoon();
});

export function start() {
  mark = new Mark(arrangeSoon);
  timeline = new Timeline(() => drawSoon());
  setText(takeForm().querySelector("label"), "Find a role or a leader");
  byId("find").addEventListener("input", () => find(byId("find").value));
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/input|textarea/i.test(event.target.tagName)) {
      event.preventDefault();
      byId("find").focus();
    }
  });
  addEventListener("scroll", () => drawSoon(false), { passive: true });
  new ResizeObserver(() => drawSoon()).observe(byId("roles"));
  whileVisible(250, () => {
    if (mark.staleMs !== null) return;
    tick(byId("rows"), now());
    if (timeline.due(byId("axis").clientWidth)) drawSoon();
  });
  whileVisible(1000, () => (roles.size || mark.staleMs !== null) && arrangeSoon());
  const reload = asking(mark, load);
  reload();
  new Stream(
    mark,
    {
      leaders: (news) => {
        known = true;
        news.leaders.forEach((row) => takeRole(row, news.now_ms));
        arrangeSoon();
      },
      nodes: (news) => {
        known = true; // the roles come before the nodes
        takeNodes(news);
        arrangeSoon();
      },
      reload,
    },
    () => {
      timeline.outdateAll(); // no news say which terms came and went meanwhile
      arrangeSoon();
    },
  );
}
