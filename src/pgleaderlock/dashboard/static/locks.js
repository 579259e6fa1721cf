// The page of the locks: one page of them at a time, asked again and again, with the time that each has left.

import {
  ask, byId, duration, h, isolated, later, now, number, oneAtATime, plural, setAttribute, setText, whileVisible,
} from "./core.js";
import { Mark } from "./live.js";
import { cell } from "./nodes.js";

const PAGE = 50;
const AGAIN_MS = 2000;
const SLOW_MS = 5000;
const ROUND_MS = [5, 10, 30, 60, 120, 300, 600].map((seconds) => 1000 * seconds);

// How long a lease was for, nobody says: a bar is full at the next round time.
const rounded = (ms) => ROUND_MS.find((round) => round >= ms) ?? ms;

export function start() {
  const body = byId("locks").tBodies[0];
  const mark = new Mark();
  const prefix = byId("find-prefix");
  const before = []; // the cursors of the pages that were turned over
  const leases = new Map(); // lock -> its token, and the time at which its bar is full
  let cursor = null;
  let next = null;
  let locks = [];
  let askedMs = null; // since when an answer is waited for

  function row(lock) {
    return h("tr", { "data-lock": lock.lock_name },
      cell("name lock", "Lock", isolated(lock.lock_name)),
      cell("name owner", "Owner", lock.owner_id === null ? h("span", { class: "free" }, "free") : isolated(lock.owner_id)),
      cell("num", "Token", number(lock.fencing_token)),
      cell("left", "Time left", ...(lock.held ? [h("span", { class: "bar", "aria-hidden": "true" }, h("i")), h("span")] : [])),
      cell("num", "Waiting", lock.waiters ? number(lock.waiters) : ""),
    );
  }

  function draw() {
    body.replaceChildren(...locks.map(row));
    byId("nothing").hidden = locks.length > 0;
    const held = locks.filter((lock) => lock.held).length;
    const waiting = locks.reduce((sum, lock) => sum + lock.waiters, 0);
    const facts = [`${plural(locks.length, "lock")} on this page`, `${number(held)} held`, waiting ? `${number(waiting)} waiting` : ""];
    setText(byId("facts"), facts.filter(Boolean).join(" \u00b7 "));
    for (const [id, on] of [["page-before", before.length > 0], ["page-next", next !== null]]) {
      if (byId(id).disabled === on) byId(id).disabled = !on;
    }
    tick();
  }

  function tick() {
    locks.forEach((lock, i) => {
      if (!lock.held) return;
      const leftMs = Math.max(0, lock.lease_expiry_ms - (mark.staleMs ?? now()));
      const left = body.rows[i].cells[3];
      const full = Math.max(leases.get(lock.lock_name)?.fullMs ?? 1, leftMs);
      left.firstChild.firstChild.style.width = `${((100 * leftMs) / full).toFixed(1)}%`;
      setAttribute(left.firstChild, "data-low", leftMs < 0.2 * full);
      setText(left.lastChild, leftMs > 0 ? duration(leftMs) : "has run out");
    });
  }

  function remember() {
    const kept = new Map();
    for (const lock of locks) {
      const old = leases.get(lock.lock_name);
      const leftMs = (lock.lease_expiry_ms ?? 0) - now();
      const fullMs = old?.token === lock.fencing_token ? Math.max(old.fullMs, rounded(leftMs)) : rounded(leftMs);
      kept.set(lock.lock_name, { token: lock.fencing_token, fullMs });
    }
    leases.clear();
    for (const [name, lease] of kept) leases.set(name, lease);
  }

  async function load() {
    const fields = { prefix: prefix.value, cursor, limit: PAGE };
    askedMs = now();
    const page = await ask("/v1/locks", fields);
    mark.told();
    if (prefix.value !== fields.prefix || cursor !== fields.cursor) return; // somebody has gone on, and that is asked next
    setText(byId("nothing"), "No lock here.");
    ({ locks, next_cursor: next } = page);
    remember();
    draw();
  }

  function refused(error) {
    if (error.status === 400 || error.status === 403) {
      mark.told();
      locks = []; // the server is there, and does not show this to us
      next = null;
      draw();
      setText(byId("nothing"), `Refused: ${error.message}.`);
    } else {
      mark.cut(error.status ? error.message : "the server cannot be reached");
    }
  }

  const reload = oneAtATime(() => load().catch(refused).finally(() => (askedMs = null)));
  const turnTo = (where) => {
    cursor = where;
    reload();
  };
  byId("finding").addEventListener("submit", (event) => event.preventDefault());
  byId("finding").querySelector("button").hidden = true;
  prefix.addEventListener("input", later(200, () => {
    before.length = 0;
    history.replaceState(null, "", prefix.value ? `?${new URLSearchParams({ prefix: prefix.value })}` : location.pathname);
    turnTo(null);
  }));
  byId("more")?.remove();
  const back = h("button", { type: "button", id: "page-before", disabled: true }, "Page before");
  const forth = h("button", { type: "button", id: "page-next", disabled: true }, "Next page");
  back.addEventListener("click", () => turnTo(before.pop()));
  forth.addEventListener("click", () => {
    before.push(cursor);
    turnTo(next);
  });
  byId("nothing").after(h("p", { class: "more" }, back, " ", forth));
  cursor = new URLSearchParams(location.search).get("cursor");
  if (cursor !== null) before.push(null);
  reload();
  whileVisible(AGAIN_MS, () => {
    if (askedMs === null) reload(); // asked again while it is slow, it would only be slower
    else if (now() - askedMs > SLOW_MS) mark.cut("the server is slow to answer");
  });
  whileVisible(250, tick);
}
