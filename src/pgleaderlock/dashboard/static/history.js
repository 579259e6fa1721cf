// The page of the history: every term of one role, or the latest of those roles that changed last.

import { ask, askTerms, badge, byId, duration, filterOf, h, later, localTimes, moment, now, number, plural, roleLink, setText, soon } from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { cell, nodeElement } from "./nodes.js";
import { colourAll } from "./colours.js";

const ROLES_AT_ONCE = 24;
const TERMS_EACH = 20;
const PAGE = 200;
const ROWS_MAX = 1000; // in the document
const TERMS_MAX = 10_000; // in the file
const SUGGESTED_MAX = 500;
const ASKING_MAX = 4;
const HEADINGS = ["Role", "Epoch", "Node", "Began", "Ended", "Lasted", "Why it ended", "Nobody led before"];
const KINDS = ["name role", "num", "name node", "when", "when", "num", "why", "num"];

// The roles and nodes that there are, for the fields that filter by them.
export async function suggest() {
  const { leaders } = await ask("/v1/leaders", { limit: SUGGESTED_MAX }).catch(() => ({ leaders: [] }));
  const { nodes } = await ask("/v1/nodes").catch(() => ({ nodes: [] }));
  const options = (names) => [...new Set(names)].sort().map((name) => h("option", { value: name }));
  byId("list-of-roles").replaceChildren(...options(leaders.map((row) => row.role)));
  byId("list-of-nodes").replaceChildren(...options(nodes.map((node) => node.node_id)));
  colourAll(nodes.map((node) => node.node_id));
}

function row(term) {
  const content = [
    roleLink(term.role),
    number(term.epoch),
    nodeElement(term.node_id),
    moment(term.began_ms),
    term.ended_ms === null ? h("span", { class: "leads" }, "leads") : moment(term.ended_ms),
    duration((term.ended_ms ?? now()) - term.began_ms),
    term.reason === null ? "" : badge(term.reason),
    term.gap_ms === null ? "" : duration(term.gap_ms),
  ];
  return h("tr", {}, ...content.map((each, i) => cell(KINDS[i], HEADINGS[i], each)));
}

// A few at a time, in the order given.
async function each(list, call) {
  const found = [];
  let next = 0;
  const work = async () => {
    while (next < list.length) {
      const place = next++;
      found[place] = await call(list[place]);
    }
  };
  await Promise.all(Array.from({ length: ASKING_MAX }, work));
  return found;
}

const termsOf = async (role, fields) => {
  const page = await askTerms(role, fields);
  return { ...page, terms: page.terms.map((term) => ({ ...term, role })) };
};

export function start() {
  const table = byId("terms");
  const mark = new Mark();
  const [roleField, nodeField] = [byId("find-role"), byId("find-node")];
  let terms = []; // what is shown, and a little more: the filter by node leaves some out
  let role = null; // if it is about one
  let cursor = null;
  let scope = "";
  let extended = false;

  const [roleWanted, nodeWanted] = [filterOf(roleField), filterOf(nodeField)];
  const wanted = () => terms.filter((term) => !nodeWanted() || term.node_id === nodeWanted());

  function draw() {
    const shown = wanted();
    const head = h("tr", {}, ...HEADINGS.map((text, i) => h("th", { scope: "col", class: KINDS[i] }, text)));
    table.tHead.replaceChildren(head);
    table.tBodies[0].replaceChildren(...shown.slice(0, ROWS_MAX).map(row));
    byId("nothing").hidden = shown.length > 0;
    byId("more")?.remove();
    if (cursor !== null && terms.length < TERMS_MAX) {
      const button = h("button", { type: "button" }, "Older terms");
      button.addEventListener("click", asking(mark, () => older().then(draw)));
      byId("nothing").after(h("p", { id: "more", class: "more" }, button));
    }
    const gaps = shown.map((term) => term.gap_ms).filter((gap) => gap > 0).sort((a, b) => a - b);
    const led = new Set(shown.map((term) => term.node_id)).size;
    setText(byId("facts"), [
      scope,
      `${plural(shown.length, "term")}${shown.length > ROWS_MAX ? `, the latest ${number(ROWS_MAX)} shown` : ""}`,
      plural(led, "node"),
      gaps.length ? `nobody led: median ${duration(gaps[gaps.length >> 1])}, longest ${duration(gaps.at(-1))}` : "",
    ].filter(Boolean).join(" \u00b7 "));
  }

  async function older() {
    if (cursor === null) return; // clicked twice
    const page = await termsOf(role, { limit: PAGE, cursor });
    terms.push(...page.terms);
    cursor = page.next_cursor;
    extended = true;
  }

  async function rolesLike(text) {
    const found = [];
    let page;
    do {
      page = await ask("/v1/leaders", { limit: 1000, cursor: page?.next_cursor });
      found.push(...page.leaders);
    } while (page.next_cursor && found.length < 20_000);
    const like = found.filter((each) => each.role.toLowerCase().includes(text.toLowerCase()));
    return like.sort((a, b) => (b.last_change?.at_ms ?? 0) - (a.last_change?.at_ms ?? 0));
  }

  async function load() {
    const text = roleWanted();
    const named = text ? (await ask("/v1/leaders", { prefix: text, limit: PAGE })).leaders.some((each) => each.role === text) : false;
    const single = named ? await termsOf(text, { limit: PAGE }) : null;
    let found = { terms: single?.terms ?? [], cursor: single?.next_cursor ?? null, role: text, scope: "" };
    if (single === null) {
      const like = await rolesLike(text);
      const pages = await each(like.slice(0, ROLES_AT_ONCE), (each) => termsOf(each.role, { limit: TERMS_EACH }));
      const all = pages.flatMap((page) => page.terms).sort((a, b) => b.began_ms - a.began_ms);
      const some = like.length > ROLES_AT_ONCE ? `the ${ROLES_AT_ONCE} of ${plural(like.length, "role")} that changed last` : plural(like.length, "role");
      found = { terms: all, cursor: null, role: null, scope: some };
    }
    ({ terms, cursor, role, scope } = found);
    extended = false;
    draw();
    localTimes();
  }

  async function csv() {
    while (role !== null && cursor !== null && terms.length < TERMS_MAX) await older();
    const iso = (ms) => (ms === null ? "" : new Date(ms).toISOString());
    const lines = wanted().map((term) => [
      term.role, term.epoch, term.node_id, iso(term.began_ms), iso(term.ended_ms),
      (term.ended_ms ?? Math.round(now())) - term.began_ms, term.reason ?? "", term.gap_ms ?? "",
    ]);
    const names = ["role", "epoch", "node_id", "began", "ended", "lasted_ms", "reason", "gap_ms"];
    const text = [names, ...lines].map((line) => line.map(quoted).join(",")).join("\r\n");
    const address = URL.createObjectURL(new Blob([`${text}\r\n`], { type: "text/csv" }));
    h("a", { href: address, download: "pgleaderlock-history.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
    draw();
  }

  const reload = asking(mark, load);
  const search = later(250, () => {
    const fields = { role: roleField.value.trim(), node: nodeField.value.trim() };
    const query = new URLSearchParams(Object.entries(fields).filter(([, value]) => value));
    history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
    reload();
  });
  roleField.addEventListener("input", search);
  nodeField.addEventListener("input", search);
  byId("finding").addEventListener("submit", (event) => event.preventDefault());
  byId("finding").querySelector("button").hidden = true;
  byId("csv").hidden = false;
  byId("csv").addEventListener("click", asking(mark, csv));
  suggest().then(reload);
  // Who has gone further back is not thrown to the beginning by news.
  const reloadSoon = soon(500, () => extended || reload());
  let told = false; // how everything was when the stream began: this page knows
  const leaders = () => (told ? reloadSoon() : (told = true));
  new Stream(mark, { leaders, reload }, () => {
    told = false;
    reloadSoon();
  });
}

// A program for tables takes what begins like this for a formula.
function quoted(value) {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
