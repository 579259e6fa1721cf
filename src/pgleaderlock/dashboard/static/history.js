// The page of the history: every term of one role, or the latest of those roles that changed last.

import { ask, askAll, askTerms, byId, duration, h, localTimes, now, number, plural, setText, soon } from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { filled, offerMore, swap } from "./rows.js";
import { asked, filters, suggest } from "./filters.js";

const ROLES_MAX = 20_000;
const ROLES_AT_ONCE = 24;
const TERMS_EACH = 20;
const PAGE = 200;
const ROWS_MAX = 1000; // in the document
const TERMS_MAX = 10_000; // in the file
const ASKING_MAX = 4;

const lastedMs = (term) => (term.ended_ms ?? Math.round(now())) - term.began_ms;

const row = (term) => filled({ ...term, key: `${term.role}\n${term.epoch}`, lasted_ms: lastedMs(term) }, now());

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
  const body = byId("terms").tBodies[0];
  const mark = new Mark();
  let terms = []; // what is shown, and a little more: the filter by node leaves some out
  let role = null; // if it is about one
  let cursor = null;
  let scope = "";
  let extended = false;

  const reload = asking(mark, load);
  const filter = filters(reload);
  // The server has found terms of it, though the list of roles may leave it out: it was forgotten.
  const served = body.rows.length && !byId("changes") ? filter().role : null;

  function inTime() {
    const { from_ms, to_ms } = asked(filter());
    return { from_ms, to_ms };
  }

  function wanted() {
    const { node } = filter();
    return node ? terms.filter((term) => term.node_id === node) : terms;
  }

  function draw() {
    const shown = wanted();
    byId("changes")?.parentElement.remove(); // what the server shows of all roles
    byId("terms").parentElement.hidden = false;
    swap(body, shown.slice(0, ROWS_MAX).map(row));
    byId("nothing").hidden = shown.length > 0;
    offerMore("Older terms", cursor !== null && terms.length < TERMS_MAX && asking(mark, () => older().then(draw)));
    const gaps = shown.map((term) => term.gap_ms).filter((gap) => gap > 0).sort((a, b) => a - b);
    const led = new Set(shown.map((term) => term.node_id)).size;
    setText(byId("facts"), [
      scope,
      `${plural(shown.length, "term")}${shown.length > ROWS_MAX ? `, the latest ${number(ROWS_MAX)} shown` : ""}`,
      plural(led, "node"),
      gaps.length ? `nobody could act: median ${duration(gaps[gaps.length >> 1])}, longest ${duration(gaps.at(-1))}` : "",
    ].filter(Boolean).join(" \u00b7 "));
  }

  async function older() {
    if (cursor === null) return; // clicked twice
    const page = await termsOf(role, { limit: PAGE, cursor, ...inTime() });
    terms.push(...page.terms);
    cursor = page.next_cursor;
    extended = true;
  }

  async function rolesLike(text) {
    const { leaders } = await askAll("/v1/leaders", "leaders", ROLES_MAX, { limit: 1000 });
    const like = leaders.filter((each) => each.role.toLowerCase().includes(text.toLowerCase()));
    return like.sort((a, b) => (b.last_change?.at_ms ?? 0) - (a.last_change?.at_ms ?? 0));
  }

  async function load() {
    const { role: text } = filter();
    const named = text && text !== served ? (await ask("/v1/leaders", { prefix: text, limit: PAGE })).leaders.some((each) => each.role === text) : Boolean(text);
    const single = named ? await termsOf(text, { limit: PAGE, ...inTime() }) : null;
    let found = { terms: single?.terms ?? [], cursor: single?.next_cursor ?? null, role: text, scope: "" };
    if (single === null) {
      const like = await rolesLike(text);
      const pages = await each(like.slice(0, ROLES_AT_ONCE), (each) => termsOf(each.role, { limit: TERMS_EACH, ...inTime() }));
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
      lastedMs(term), term.reason ?? "", term.gap_ms ?? "",
    ]);
    const names = ["role", "epoch", "node_id", "began", "ended", "lasted_ms", "reason", "gap_ms"];
    const text = [names, ...lines].map((line) => line.map(quoted).join(",")).join("\r\n");
    const address = URL.createObjectURL(new Blob([`${text}\r\n`], { type: "text/csv" }));
    h("a", { href: address, download: "pgleaderlock-history.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
    draw();
  }

  byId("csv").hidden = false;
  byId("csv").addEventListener("click", asking(mark, csv));
  suggest().then(reload);
  // News do not throw a reader who has gone further back to the beginning.
  const reloadSoon = soon(500, () => extended || reload());
  let told = false; // a stream begins with all leaders, which this page has asked for itself
  const leaders = () => (told ? reloadSoon() : (told = true));
  new Stream(mark, { leaders, reload }, () => {
    told = false;
    reloadSoon();
  });
}

// A spreadsheet takes what begins like this for a formula.
function quoted(value) {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
