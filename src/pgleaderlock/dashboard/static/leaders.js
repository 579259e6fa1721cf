// The page of the leaders: every role in memory, the rows that are in sight in the document, the news from the stream.

import {
  ago, ask, byId, clock, duration, h, isolated, localTimes, now, number, plural, roleLink, setAttribute, setText,
  soon, whileVisible,
} from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { Timeline } from "./timeline.js";
import { colourAll, colourOf } from "./colours.js";

const ROLES_MAX = 20_000;
const PAGE = 1000;
const OVERSCAN = 6; // rows beyond the edge, for whoever goes on with the keyboard
const LEGEND_MAX = 16;
const DEFAULT_NAMESPACE = "pgleaderlock";

const roles = new Map(); // key -> row, as the API gives it, and when its leader was last heard
const nodes = new Map(); // session -> node
let order = []; // what is shown: filtered, and what is wrong first
let nodesMs = 0; // when they were as they are here
let known = false; // which roles there are: none is an answer, too
let mark, timeline;

// 0: nobody leads. 1: its leader is late. 2: it leads and may not act yet. 3: all is well.
function badness(row) {
  if (row.leader === null) return 0;
  if (row.heartbeat !== "ok") return 1;
  return row.gate === "open" ? 3 : 2;
}

const keyOf = (row) => JSON.stringify([row.namespace, row.role]);

// `asked`: it was asked for, and the stream may have told something newer while the answer was on its way.
function takeRole(row, nowMs, asked = false) {
  const key = keyOf(row);
  const before = roles.get(key);
  if (asked && before?.toldMs > nowMs) return;
  const heardMs = row.heartbeat_age_ms === null ? (before?.heardMs ?? null) : nowMs - row.heartbeat_age_ms;
  roles.set(key, { ...row, key, heardMs, toldMs: nowMs, find: `${row.role}\n${row.leader ?? ""}\n${row.namespace}`.toLowerCase() });
  if (!before || before.epoch !== row.epoch || before.leader !== row.leader) timeline.outdate(key);
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
    // One that is late is told about when it is heard again.
    if (row.heartbeat === "ok" && heardMs > row.heardMs) row.heardMs = heardMs;
  }
}

// --- The order, and the sentence that sums it up

function arrange() {
  const wanted = byId("find").value.trim().toLowerCase();
  const all = [...roles.values()];
  order = wanted ? all.filter((row) => row.find.includes(wanted)) : all;
  const byName = (a, b) => (a.role < b.role ? -1 : a.role > b.role ? 1 : a.namespace < b.namespace ? -1 : 1);
  order.sort((a, b) => badness(a) - badness(b) || byName(a, b));
  sumUp(all, wanted);
}

function sumUp(all, wanted) {
  if (!known) return;
  const free = all.filter((row) => badness(row) === 0).length;
  const late = all.filter((row) => badness(row) === 1).length;
  const which = plural(all.length, "role");
  const wrong = [free && `${number(free)} without a leader`, late && `${number(late)} with a late heartbeat`].filter(Boolean);
  let sentence = all.length > 1 ? `All ${which} led` : "The one role is led";
  if (!all.length) sentence = "No roles";
  if (wrong.length) sentence = `${wrong.join(", ")}, of ${which}`;
  setText(byId("state"), sentence);
  setAttribute(byId("state"), "class", free ? "bad" : late ? "late" : "well");
  document.title = `${free + late ? `(${free + late}!) ` : ""}Leaders \u00b7 pgleaderlock`;
  byId("nothing").hidden = order.length > 0;
  setText(byId("nothing"), wanted ? "No role and no leader is called like that." : "No role has been led yet. Roles appear here once a node has won one.");
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
  byId("find").value = text;
  arrange();
  draw();
}

// --- Rows: built when they come into sight, changed in place while they are

const built = new Map(); // key -> element

function build(key) {
  const cell = (name, label, ...content) => h("div", { role: name === "role" ? "rowheader" : "cell", class: `c-${name}`, "data-label": label }, ...content);
  const row = roles.get(key);
  const namespace = row.namespace === DEFAULT_NAMESPACE ? null : h("small", {}, isolated(row.namespace));
  const element = h("div", { role: "row", class: "row" },
    cell("role", "Role", roleLink(row.role), namespace),
    cell("leader", "Leader", h("span", { class: "node" }), h("small")),
    cell("tenure", "Leads for", h("span"), h("small")),
    cell("beat", "Heartbeat", h("span", { class: "beat" })),
    cell("gate", "Gate", h("span", { class: "badge" })),
    cell("cand", "Candidates", h("span")),
    cell("change", "Last change", h("span"), h("small")),
    cell("lane", null, h("div", { class: "lane", role: "group", "aria-label": `Terms of ${row.role}` })),
  );
  built.set(key, element);
  return element;
}

function fill(element, row, index) {
  const at = (name) => element.querySelector(`.c-${name}`);
  setAttribute(element, "data-wrong", badness(row));
  setAttribute(element, "aria-rowindex", index + 2);
  const leader = at("leader");
  const shown = row.leader ?? "";
  if (leader.dataset.leader !== shown) {
    leader.dataset.leader = shown;
    const name = row.leader === null
      ? h("strong", { class: "nobody" }, "nobody")
      : h("span", { class: `node n${colourOf(row.leader)}` }, h("i", { class: "chip" }), isolated(row.leader));
    leader.firstChild.replaceWith(name);
  }
  setText(leader.lastChild, `epoch ${row.epoch}`);
  const since = at("tenure").lastChild;
  if (since.dataset.ms !== String(row.since_ms)) {
    since.dataset.ms = row.since_ms;
    since.replaceChildren(...(row.since_ms === null ? [] : ["since ", clock(row.since_ms)]));
  }
  setAttribute(at("gate").firstChild, "data-gate", row.gate);
  setText(at("gate").firstChild, row.gate);
  setText(at("cand").firstChild, number(row.candidates));
  setText(at("change").firstChild, row.last_change === null ? "\u2013" : row.last_change.kind.replaceAll("_", " "));
  tickRow(element, row);
}

// What changes by itself while time passes. When the news stop, it stands still too.
function tickRow(element, row) {
  const nowMs = mark.staleMs ?? now();
  const at = (name) => element.querySelector(`.c-${name}`).firstChild;
  setText(at("tenure"), row.since_ms === null ? "\u2013" : duration(Math.max(0, nowMs - row.since_ms)));
  const beat = at("beat");
  setAttribute(beat, "data-beat", row.heartbeat);
  const age = row.heartbeat_age_ms === null ? "none" : duration(Math.max(0, nowMs - row.heardMs));
  setText(beat, row.heartbeat === "late" ? `${age} late` : age);
  const { at_ms: changedMs, reason } = row.last_change ?? {};
  setText(at("change").nextSibling, row.last_change ? `${reason ? `after ${reason}, ` : ""}${ago(nowMs - changedMs)}` : "");
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

// `everything`: what is there already may have changed; otherwise somebody has only scrolled.
function draw(everything = true) {
  const rows = byId("rows");
  if (rows.dataset.script !== "yes") {
    rows.dataset.script = "yes";
    setAttribute(byId("roles"), "data-script", "yes");
    rows.replaceChildren(); // the server's rows have done their work
  }
  if (everything) measure();
  const [first, last] = inSight();
  const shown = order.slice(first, last);
  rows.style.height = `${order.length * rowPx}px`;
  rows.style.paddingTop = `${first * rowPx}px`;
  const fresh = place(rows, shown);
  shown.forEach((row, i) => {
    if (everything || fresh.has(row.key)) fill(built.get(row.key), row, first + i);
  });
  if (everything) {
    setAttribute(byId("roles"), "aria-rowcount", order.length + 1);
    timeline.drawAxis();
  }
  for (const row of shown) {
    if (everything || fresh.has(row.key)) timeline.draw(built.get(row.key).lastChild.firstChild, row, lanePx, mark.staleMs);
  }
  timeline.want(shown);
}

// Puts the rows in sight into their order; gives those that are new.
function place(rows, shown) {
  const focused = rows.contains(document.activeElement) ? document.activeElement : null;
  const keys = new Set(shown.map((row) => row.key));
  for (const [key, element] of built) {
    if (!keys.has(key)) {
      element.remove();
      built.delete(key);
    }
  }
  const fresh = new Set();
  shown.forEach((row, i) => {
    if (!built.has(row.key)) {
      build(row.key);
      fresh.add(row.key);
    }
    const element = built.get(row.key);
    if (rows.children[i] !== element) rows.insertBefore(element, rows.children[i] ?? null);
  });
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
  return fresh;
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
  mark = new Mark();
  timeline = new Timeline(() => drawSoon());
  const label = byId("finding").querySelector("label");
  setText(label, "Find a role or a leader");
  byId("finding").querySelector("button").hidden = true;
  byId("finding").addEventListener("submit", (event) => event.preventDefault());
  byId("find").addEventListener("input", () => {
    arrange();
    draw();
  });
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
    for (const [key, element] of built) if (roles.has(key)) tickRow(element, roles.get(key));
    if (timeline.due(byId("axis").clientWidth)) drawSoon();
  });
  whileVisible(1000, () => roles.size && arrangeSoon());
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
      timeline.outdateAll(); // which terms came and went while nobody listened is in no news
      arrangeSoon();
    },
  );
}
