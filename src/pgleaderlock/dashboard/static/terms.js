// From terms to what a lane shows, without any element: spans, gaps, and what is too small to be seen alone.

const SPAN_PX_MIN = 3;
const GAP_PX_MIN = 4;
const ITEMS_MAX = 300;

// Terms (the newest first) and the role's row become segments in the order of time. What is drawn of a term is when its
// leader could act; whenever nobody could, there is a gap, between terms and within one. A term that still lasts ends
// where its leader was last heard if that is late.
export function segments(terms, row, nowMs, { more = false, toNow = true } = {}) {
  const found = [];
  let endedMs = null;
  let ended = null;
  for (const term of [...terms].reverse()) {
    for (const [piece, { fromMs, toMs, why }] of acted(term, term.ended_ms ?? lastSign(term, row, nowMs)).entries()) {
      if (ended === null && term.gap_ms > 0) endedMs = fromMs - term.gap_ms; // the one before is out of sight
      if (endedMs !== null && fromMs > endedMs) {
        found.push({ kind: "gap", fromMs: endedMs, toMs: fromMs, after: ended, before: term, why });
      }
      found.push({ kind: "term", fromMs, toMs, term, piece });
      endedMs = toMs;
      ended = term;
    }
  }
  if (ended !== null && endedMs < nowMs) {
    found.push({ kind: "gap", fromMs: endedMs, toMs: nowMs, after: ended, before: null, lasts: toNow, cut: !toNow });
  }
  if (more && found.length) found.unshift({ kind: "unknown", fromMs: 0, toMs: found[0].fromMs });
  return found;
}

// When the leader of a term could act, and why it could not before each time but the first. None if it never could.
function acted(term, lastMs) {
  if (term.opened_ms === null) return [];
  const pieces = [];
  let fromMs = term.opened_ms;
  let why = null;
  for (const [shutMs, openedMs, reason] of term.gaps) {
    if (shutMs > fromMs) pieces.push({ fromMs, toMs: shutMs, why });
    [fromMs, why] = [openedMs, reason];
  }
  return [...pieces, { fromMs, toMs: Math.max(fromMs, term.shut_ms ?? lastMs), why }];
}

function lastSign(term, row, nowMs) {
  if (row.epoch !== term.epoch || row.heartbeat === "ok" || row.heardMs === null) return nowMs;
  return Math.min(nowMs, row.heardMs);
}

// Segments become items with a place in pixels. Terms that are too small to be seen stand together. A gap is always seen;
// those that would cover each other become one, with what is between them.
export function items(found, fromMs, toMs, widthPx) {
  const perMs = widthPx / (toMs - fromMs);
  const placed = [];
  for (const segment of found) {
    if (segment.toMs < fromMs || segment.fromMs > toMs) continue;
    const leftPx = Math.max(0, (segment.fromMs - fromMs) * perMs);
    const rightPx = Math.min(widthPx, (segment.toMs - fromMs) * perMs);
    const item = { ...segment, leftPx, widthPx: rightPx - leftPx };
    if (item.kind === "gap") placeGap(placed, item, widthPx);
    else placeTerm(placed, item);
  }
  while (placed.length > ITEMS_MAX) join(placed[0], placed.splice(1, 1)[0], "several");
  return placed;
}

function placeTerm(placed, item) {
  const last = placed.at(-1);
  item.tiny = item.kind === "term" && item.widthPx < SPAN_PX_MIN;
  if (item.tiny && last?.tiny && last.kind !== "gap" && item.leftPx - (last.leftPx + last.widthPx) < 1) join(last, item, "several");
  else placed.push({ ...item, widthPx: Math.max(1, item.widthPx) });
}

function placeGap(placed, item, widthPx) {
  item.widthPx = Math.max(GAP_PX_MIN, item.widthPx);
  item.leftPx = Math.min(item.leftPx, widthPx - item.widthPx);
  const before = placed.findLastIndex((each) => each.kind === "gap");
  if (before >= 0 && item.leftPx < placed[before].leftPx + placed[before].widthPx + 1) {
    for (const between of placed.splice(before + 1)) join(placed[before], between, "gap");
    join(placed[before], item, "gap");
  } else {
    placed.push(item);
  }
}

function join(into, item, kind) {
  into.several ??= [{ ...into }];
  into.several.push(...(item.several ?? [item]));
  into.kind = kind;
  into.toMs = item.toMs;
  into.lasts = item.lasts;
  into.widthPx = Math.max(SPAN_PX_MIN, item.leftPx + item.widthPx - into.leftPx);
}

// Given back on purpose, and taken over soon after; of several gaps, if each is one.
const HANDOVER_MS = 5000;

export function isHandover(item) {
  const gaps = item.several ? item.several.filter((each) => each.kind === "gap") : [item];
  return gaps.every(({ after, before, fromMs, toMs }) => after?.reason === "released" && before && toMs - fromMs < HANDOVER_MS);
}

// In which part of its time nobody led: an hour with twelve gaps of six seconds is no hour without a leader.
export function shareOf(item) {
  const gaps = item.several ? item.several.filter((each) => each.kind === "gap") : [item];
  const withoutMs = gaps.reduce((sum, gap) => sum + gap.toMs - gap.fromMs, 0);
  return withoutMs / Math.max(1, item.toMs - item.fromMs);
}

// Where the axis has its marks: at round times, and not closer than they can be read.
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

// `offsetAt`: how far the clock on the wall is ahead of UTC at a moment: not the same in summer and in winter.
export function ticks(fromMs, toMs, widthPx, apartPx, offsetAt) {
  const leastS = ((toMs - fromMs) / 1000) * (apartPx / Math.max(1, widthPx));
  const stepMs = 1000 * (STEPS_S.find((step) => step >= leastS) ?? STEPS_S.at(-1));
  const marks = [];
  const fixedMs = stepMs < 21_600_000 ? offsetAt(toMs) : null; // hours go on evenly, days begin at midnight
  for (let wallMs = Math.ceil((fromMs + (fixedMs ?? offsetAt(fromMs))) / stepMs) * stepMs - stepMs; ; wallMs += stepMs) {
    const at = wallMs - (fixedMs ?? offsetAt(wallMs - offsetAt(wallMs)));
    if (at > toMs) break;
    if (at >= fromMs) marks.push(at);
  }
  return { stepMs, marks };
}
