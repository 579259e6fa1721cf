// The lanes: one per role, all on one axis. Terms are asked for only where they are in sight, and forgotten again.

import { askTerms, byId, clockText, dateText, duration, h, momentText, now, plural, setAttribute } from "./core.js";
import { colourOf } from "./colours.js";
import { isHandover, items, segments, shareOf, ticks } from "./terms.js";

const LANES_MAX = 200; // remembered
const TERMS_MAX = 1000; // of one lane; more are seen by zooming in
const PAGE = 500;
const ASKING_MAX = 4;
const RETRY_MS = 3000;
const SPAN_MS_MIN = 10_000;
const SPAN_MS_MAX = 90 * 86_400_000;
const RANGE_KEY = "pgleaderlock-range";
const LABEL_PX = 12;
const LABEL_EDGE_PX = 10;
const WIDTHS_MAX = 1000;

export class Timeline {
  #lanes = new Map();
  #asking = 0;
  #wanted = [];
  #shown = new WeakMap(); // element -> item
  #drawnMs = 0;

  constructor(redraw) {
    this.redraw = redraw;
    this.spanMs = 1000 * (Number(sessionStorage.getItem(RANGE_KEY)) || 3600);
    this.endMs = null; // null: now
    this.#ofAddress();
    byId("ranges").hidden = false;
    byId("ranges").addEventListener("click", (event) => this.#press(event.target.closest("button")));
    this.#press(null);
    this.#tips();
    this.#dragging();
  }

  get toMs() {
    return this.endMs ?? now();
  }

  get fromMs() {
    return this.toMs - this.spanMs;
  }

  // --- What time is shown

  show(spanMs, endMs) {
    this.spanMs = Math.min(SPAN_MS_MAX, Math.max(SPAN_MS_MIN, spanMs));
    this.endMs = endMs !== null && endMs < now() ? endMs : null;
    this.#press(null);
    this.#intoAddress();
    this.redraw();
  }

  // The address says which time is shown, unless that is the present: it can be sent to somebody else.
  #ofAddress() {
    const given = new URLSearchParams(location.search);
    const [fromMs, toMs] = ["from", "to"].map((name) => Date.parse(given.get(name) ?? ""));
    if (!(fromMs < toMs)) return;
    this.spanMs = Math.min(SPAN_MS_MAX, Math.max(SPAN_MS_MIN, toMs - fromMs));
    this.endMs = toMs < now() ? toMs : null;
  }

  #intoAddress() {
    const query = new URLSearchParams(location.search);
    for (const [name, ms] of [["from", this.fromMs], ["to", this.toMs]]) {
      if (this.endMs === null) query.delete(name);
      else query.set(name, new Date(ms).toISOString());
    }
    history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  }

  #press(button) {
    if (button?.dataset.range) {
      sessionStorage.setItem(RANGE_KEY, button.dataset.range);
      return this.show(1000 * button.dataset.range, null);
    }
    const middleMs = this.toMs - this.spanMs / 2;
    switch (button?.dataset.move) {
      case "in":
        return this.show(this.spanMs / 2, this.endMs === null ? null : middleMs + this.spanMs / 4);
      case "out":
        return this.show(this.spanMs * 2, this.endMs === null ? null : middleMs + this.spanMs);
      case "back":
        return this.show(this.spanMs, this.toMs - this.spanMs / 2);
      case "now":
        return this.show(this.spanMs, null);
      case "forth":
        return this.show(this.spanMs, this.endMs === null ? null : this.endMs + this.spanMs / 2);
    }
    for (const each of byId("ranges").querySelectorAll("[data-range]")) {
      const pressed = this.endMs === null && this.spanMs === 1000 * each.dataset.range;
      setAttribute(each, "aria-pressed", pressed);
    }
    for (const later of ["forth", "now"]) {
      byId("ranges").querySelector(`[data-move="${later}"]`).disabled = this.endMs === null;
    }
    return undefined;
  }

  // Whether a second look would show anything else: a pixel of seven days is ten minutes long.
  due(widthPx) {
    return this.endMs === null && now() - this.#drawnMs >= this.spanMs / Math.max(200, widthPx);
  }

  drawAxis() {
    this.#drawnMs = now();
    const axis = byId("axis");
    const widthPx = axis.clientWidth;
    const offsetAt = (ms) => -60_000 * new Date(ms).getTimezoneOffset();
    const { stepMs, marks } = ticks(this.fromMs, this.toMs, widthPx, 76, offsetAt);
    const words = (ms) => (stepMs >= 86_400_000 ? dateText(ms).slice(5) : clockText(ms).slice(0, stepMs < 60_000 ? 8 : 5));
    const at = (ms) => ((ms - this.fromMs) / this.spanMs) * widthPx;
    const labels = marks.map((ms) => {
      const label = h("span", { class: "tick" }, words(ms));
      label.style.left = `${at(ms)}px`;
      return label;
    });
    axis.replaceChildren(h("span", { class: "hush" }, "Timeline"), ...labels);
    const roles = byId("roles");
    roles.style.setProperty("--step", `${(stepMs / this.spanMs) * widthPx}px`);
    roles.style.setProperty("--shift", `${marks.length ? at(marks[0]) : 0}px`);
  }

  // --- Terms: asked for when their lane is looked at

  want(rows) {
    this.#wanted = rows.filter((row) => !this.#covered(this.#lanes.get(row.key)));
    this.#askNext();
  }

  // Its role has changed hands.
  outdate(key) {
    const lane = this.#lanes.get(key);
    if (lane) lane.old = true;
  }

  outdateAll() {
    for (const lane of this.#lanes.values()) lane.old = true;
  }

  #covered(lane) {
    if (!lane) return false;
    if (lane.loading) return true;
    if (lane.failed) return now() - lane.triedMs < RETRY_MS;
    if (lane.old) return false;
    const reaches = lane.askedMs <= this.fromMs && (lane.toNow || lane.toMs >= this.toMs);
    const showsMoreNow = lane.more && lane.fromMs > this.fromMs && this.spanMs < 0.9 * lane.spanMs;
    return reaches && !showsMoreNow;
  }

  #askNext() {
    while (this.#asking < ASKING_MAX && this.#wanted.length) this.#load(this.#wanted.shift());
  }

  async #load(row) {
    const before = this.#lanes.get(row.key);
    const [fromMs, toMs, spanMs, toNow] = [this.fromMs, this.toMs, this.spanMs, this.endMs === null];
    const lane = { ...before, terms: before?.terms ?? [], loading: true, old: false };
    this.#remember(row.key, lane);
    this.#asking++;
    try {
      const terms = [];
      let cursor = null;
      do {
        const range = { from_ms: Math.floor(fromMs), to_ms: toNow ? null : Math.ceil(toMs), limit: PAGE, cursor };
        const page = await askTerms(row.role, range);
        terms.push(...page.terms);
        cursor = page.next_cursor;
      } while (cursor && terms.length < TERMS_MAX);
      const reachesMs = cursor ? terms.at(-1).began_ms : fromMs;
      const more = Boolean(cursor);
      Object.assign(lane, { terms, more, fromMs: reachesMs, askedMs: fromMs, toMs, spanMs, toNow, failed: false });
    } catch {
      lane.failed = true; // the bar says why: the stream has ended, too
    }
    lane.loading = false;
    lane.triedMs = now();
    this.#asking--;
    this.redraw();
  }

  #remember(key, lane) {
    this.#lanes.delete(key);
    this.#lanes.set(key, lane);
    for (const oldest of this.#lanes.keys()) {
      if (this.#lanes.size <= LANES_MAX) break;
      this.#lanes.delete(oldest);
    }
  }

  // --- Drawing

  draw(element, row, widthPx, frozenMs) {
    const lane = this.#lanes.get(row.key);
    setAttribute(element, "data-state", lane?.askedMs !== undefined ? "there" : lane?.failed ? "failed" : "waits");
    const until = lane?.toNow ? (frozenMs ?? now()) : lane?.toMs;
    const found = lane ? segments(lane.terms, row, until, lane) : [];
    const placed = items(found, this.fromMs, this.toMs, widthPx);
    const reusable = new Map([...element.children].map((child) => [child.dataset.key, child]));
    const drawn = placed.map((item) => this.#item(item, reusable));
    const focused = element.contains(document.activeElement) ? document.activeElement : null;
    const same = drawn.length === element.children.length && drawn.every((child, i) => child === element.children[i]);
    if (!same) element.replaceChildren(...drawn);
    if (focused && document.activeElement !== focused) (drawn.includes(focused) ? focused : drawn.at(-1))?.focus();
    const stop = drawn.find((child) => child.tabIndex === 0) ?? drawn.at(-1);
    for (const child of drawn) child.tabIndex = child === stop ? 0 : -1;
  }

  #item(item, reusable) {
    const key = `${item.kind}${item.term ? `${item.term.epoch}.${item.piece}` : Math.round(item.fromMs)}`;
    let element = reusable.get(key);
    if (!element) {
      element = h("button", { type: "button", class: "span", "data-key": key, "data-kind": item.kind, tabindex: -1 });
      if (item.kind === "term") element.append(h("bdi", { "aria-hidden": "true" }, item.term.node_id));
    }
    if (item.kind === "term") element.className = `span n${colourOf(item.term.node_id)}`;
    setAttribute(element, "data-cut", item.fromMs < this.fromMs);
    setAttribute(element, "data-handover", item.kind === "gap" && isHandover(item));
    setAttribute(element, "data-several", Boolean(item.several));
    if (item.kind === "gap") element.style.setProperty("--share", shareOf(item).toFixed(3));
    // A name of which three letters are seen tells nothing.
    else if (element.firstChild) element.firstChild.hidden = item.widthPx < widthOf(item.term.node_id) + LABEL_EDGE_PX;
    element.style.left = `${item.leftPx.toFixed(1)}px`;
    element.style.width = `${item.widthPx.toFixed(1)}px`;
    this.#shown.set(element, item);
    // The words change with every second that a term lasts; they do not change under the focus.
    if (!element.hasAttribute("aria-label") || document.activeElement !== element) {
      setAttribute(element, "aria-label", words(item).join(". "));
    }
    return element;
  }

  // --- Words, beside the pointer and for the focus

  #tips() {
    const roles = byId("roles");
    this.tip = h("div", { class: "tip", "aria-hidden": "true", hidden: true });
    document.body.append(this.tip);
    const show = (event) => this.#showTip(event.target.closest?.(".span"));
    roles.addEventListener("pointerover", show);
    roles.addEventListener("focusin", show);
    roles.addEventListener("pointerleave", () => this.#showTip(null));
    roles.addEventListener("focusout", () => this.#showTip(null));
    // What has the focus keeps its words when the page moves to show it.
    const focused = () => document.activeElement?.closest?.(".span") ?? null;
    addEventListener("scroll", () => this.#showTip(focused()), { passive: true });
    roles.addEventListener("keydown", (event) => this.#key(event));
  }

  #showTip(element) {
    const item = element && this.#shown.get(element);
    this.tip.hidden = !item;
    if (!item) return;
    const [first, ...rest] = words(item);
    this.tip.replaceChildren(h("strong", {}, h("bdi", {}, first)), ...rest.map((line) => h("span", {}, line)));
    const box = element.getBoundingClientRect();
    const tip = this.tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left + box.width / 2 - tip.width / 2, document.documentElement.clientWidth - tip.width - 8));
    const above = box.top - tip.height - 8;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${above > 60 ? above : box.bottom + 8}px`;
  }

  #key(event) {
    const element = event.target.closest(".span");
    if (!element) return;
    const lanes = () => [...document.querySelectorAll("#rows .lane")];
    const lane = element.parentElement;
    const spans = [...lane.children];
    const middle = (each) => parseFloat(each.style.left) + parseFloat(each.style.width) / 2;
    const nearest = (other) =>
      other && [...other.children].sort((a, b) => Math.abs(middle(a) - middle(element)) - Math.abs(middle(b) - middle(element)))[0];
    const next = {
      ArrowLeft: () => spans[spans.indexOf(element) - 1],
      ArrowRight: () => spans[spans.indexOf(element) + 1],
      Home: () => spans[0],
      End: () => spans.at(-1),
      ArrowUp: () => nearest(lanes()[lanes().indexOf(lane) - 1]),
      ArrowDown: () => nearest(lanes()[lanes().indexOf(lane) + 1]),
    }[event.key];
    if (event.key === "Escape") this.#showTip(null);
    if (!next) return;
    event.preventDefault();
    const to = next();
    if (!to) return;
    for (const each of to.parentElement.children) each.tabIndex = each === to ? 0 : -1;
    to.focus();
  }

  // --- Zoom by drag

  #dragging() {
    const roles = byId("roles");
    const band = h("div", { class: "band", hidden: true });
    roles.append(band);
    let began = null;
    const box = () => byId("axis").getBoundingClientRect();
    const timeAt = (x) => this.fromMs + ((x - box().left) / box().width) * this.spanMs;
    const inside = (x) => Math.max(box().left, Math.min(box().right, x));
    const end = () => {
      began = null;
      band.hidden = true;
    };
    roles.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && event.target.closest(".c-lane")) began = { x: event.clientX, toMs: this.toMs };
    });
    addEventListener("pointermove", (event) => {
      if (!began || Math.abs(event.clientX - began.x) < 6) return;
      this.#showTip(null);
      const [left, right] = [began.x, inside(event.clientX)].sort((a, b) => a - b);
      band.hidden = false;
      band.style.left = `${left - roles.getBoundingClientRect().left}px`;
      band.style.width = `${right - left}px`;
    });
    addEventListener("pointerup", (event) => {
      const drawn = began && !band.hidden;
      const [fromMs, toMs] = drawn ? [began.x, inside(event.clientX)].map(timeAt).sort((a, b) => a - b) : [];
      end();
      if (drawn) this.show(toMs - fromMs, toMs);
    });
    addEventListener("pointercancel", end);
    addEventListener("keydown", (event) => event.key === "Escape" && end());
  }
}

// How wide a label is, in the font of the lanes.
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

function widthOf(name) {
  if (!widths.has(name)) {
    if (widths.size > WIDTHS_MAX) widths.clear();
    pen.font = `${LABEL_PX}px ${getComputedStyle(document.body).fontFamily}`;
    widths.set(name, pen.measureText(name).width);
  }
  return widths.get(name);
}

function when(fromMs, toMs) {
  const sameDay = dateText(fromMs) === dateText(toMs) && dateText(toMs) === dateText(now());
  const text = sameDay ? clockText : momentText;
  return [text(fromMs), text(toMs)];
}

// Who, from when to when, and why it ended: one line each.
function words(item) {
  const lastsMs = item.toMs - item.fromMs;
  const [from, to] = when(item.fromMs, item.toMs);
  if (item.several) {
    const ofKind = (kind) => item.several.filter((each) => each.kind === kind);
    const withoutMs = ofKind("gap").reduce((sum, gap) => sum + gap.toMs - gap.fromMs, 0);
    const terms = plural(ofKind("term").length, "term");
    const first = withoutMs > 0 ? [`Nobody could act for ${duration(withoutMs)}`, `in ${plural(ofKind("gap").length, "gap")}, between ${terms}`] : [terms];
    return [...first, `${from} to ${to}`, "zoom in to see each"];
  }
  if (item.kind === "term") {
    const { node_id: node, epoch, ended_ms: endedMs, reason } = item.term;
    if (endedMs === null) return [node, `leads since ${from}, for ${duration(lastsMs)}`, `epoch ${epoch}`];
    return [node, `led ${from} to ${to}, for ${duration(lastsMs)}`, `ended: ${reason ?? "unknown"}`, `epoch ${epoch}`];
  }
  if (item.kind === "gap") {
    if (item.why) return ["Nobody could act", `${from} to ${to}, for ${duration(lastsMs)}`, `${item.after.node_id} led: ${item.why.replaceAll("_", " ")}`];
    const why = item.after?.reason ? [`the term before, of ${item.after.node_id}, ended: ${item.after.reason}`] : [];
    if (item.cut) return ["Nobody could act", `from ${from} on, for at least ${duration(lastsMs)}`, ...why];
    if (item.lasts) return ["Nobody may act", `since ${from}, for ${duration(lastsMs)}`, ...why];
    return ["Nobody could act", `${from} to ${to}, for ${duration(lastsMs)}`, ...why];
  }
  return ["Not shown", "more terms than a lane holds: zoom in"];
}
