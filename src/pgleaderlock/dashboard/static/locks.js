// The page of the locks: one page of them at a time, asked again and again, with the time that each has left.

import { ask, byId, h, later, now, number, oneAtATime, plural, sayNothing, setAttribute, setText, whileVisible } from "./core.js";
import { Mark } from "./live.js";
import { filled, swap, tick } from "./rows.js";
import { remember, takeForm } from "./filters.js";

const PAGE = 50;
const AGAIN_MS = 2000;
const SLOW_MS = 5000;
const ROUND_MS = [5, 10, 30, 60, 120, 300, 600].map((seconds) => 1000 * seconds);

// The server does not say how long a lease was for: a bar is full at the next round time.
const rounded = (ms) => ROUND_MS.find((round) => round >= ms) ?? ms;

const valuesOf = (lock) => ({
  ...lock, key: lock.lock_name, expiry_ms: lock.held ? lock.lease_expiry_ms : null, waiters: lock.waiters || null,
});

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

  function draw() {
    swap(body, locks.map((lock) => filled(valuesOf(lock), mark.staleMs ?? now())));
    byId("nothing").hidden = locks.length > 0;
    const held = locks.filter((lock) => lock.held).length;
    const waiting = locks.reduce((sum, lock) => sum + lock.waiters, 0);
    const facts = [`${plural(locks.length, "lock")} on this page`, `${number(held)} held`, waiting ? `${number(waiting)} waiting` : ""];
    setText(byId("facts"), facts.filter(Boolean).join(" \u00b7 "));
    for (const [id, on] of [["page-before", before.length > 0], ["page-next", next !== null]]) {
      if (byId(id).disabled === on) byId(id).disabled = !on;
    }
    passTime();
  }

  function passTime() {
    const nowMs = mark.staleMs ?? now();
    tick(body, nowMs);
    locks.forEach((lock, i) => {
      if (!lock.held) return;
      const leftMs = Math.max(0, lock.lease_expiry_ms - nowMs);
      const full = Math.max(leases.get(lock.lock_name)?.fullMs ?? 1, leftMs);
      const bar = body.rows[i].querySelector(".bar i");
      bar.style.width = `${((100 * leftMs) / full).toFixed(1)}%`;
      setAttribute(bar, "data-low", leftMs < 0.2 * full);
    });
  }

  function fillBars() {
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
    if (prefix.value !== fields.prefix || cursor !== fields.cursor) return; // what is wanted now is asked next
    sayNothing(prefix.value);
    ({ locks, next_cursor: next } = page);
    fillBars();
    draw();
  }

  function refused(error) {
    if (error.status === 400 || error.status === 403) {
      mark.told();
      locks = []; // the server is there, and does not show these
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
  takeForm();
  prefix.addEventListener("input", later(200, () => {
    before.length = 0;
    remember({ prefix: prefix.value });
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
  whileVisible(250, passTime);
}
