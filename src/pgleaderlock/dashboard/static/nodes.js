// The page of the nodes.

import {
  ask, badge, byId, duration, h, isolated, localTimes, moment, now, number, plural, setText, whileVisible,
} from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { colourAll, colourOf } from "./colours.js";

const NODES_MAX = 2000;

export const nodeElement = (node) =>
  h("span", { class: `node n${colourOf(node)}` }, h("i", { class: "chip" }), isolated(node));

export const cell = (kind, label, ...content) => h("td", { class: kind, "data-label": label }, ...content);

function stateOf(node) {
  if (!node.live) return "silent";
  if (node.draining) return "draining";
  return node.candidate ? "live" : "looks on";
}

function row(node, most) {
  const share = h("span", { class: "share", "aria-hidden": "true" }, h("i"));
  share.firstChild.style.width = `${(100 * node.roles) / Math.max(1, most)}%`;
  return h("tr", {},
    cell("name node", "Node", nodeElement(node.node_id)),
    cell("why", "State", badge(stateOf(node))),
    cell("num", "Leads", share, number(node.roles)),
    cell("num", "Heartbeat"),
    cell("name", "Host", isolated(node.host)),
    cell("name", "Version", isolated(node.version)),
    cell("when", "Up since", moment(node.started_ms)),
  );
}

export function start() {
  const body = byId("nodes").tBodies[0];
  const mark = new Mark();
  let shown = [];
  let takenMs = now();
  let toldMs = 0; // by the stream, which may overtake an answer

  function take({ nodes, now_ms: nowMs }) {
    takenMs = nowMs;
    colourAll(nodes.map((node) => node.node_id));
    shown = [...nodes].sort((a, b) => a.live - b.live || (a.node_id < b.node_id ? -1 : a.node_id > b.node_id ? 1 : a.session_id - b.session_id));
    const most = Math.max(0, ...shown.map((node) => node.roles));
    body.replaceChildren(...shown.map((node) => row(node, most)));
    byId("nothing").hidden = shown.length > 0;
    byId("more")?.remove();
    const live = shown.filter((node) => node.live).length;
    setText(byId("facts"), `${plural(live, "live node")}${shown.length > live ? `, ${shown.length - live} silent` : ""}`);
    tick();
  }

  function tick() {
    const passedMs = (mark.staleMs ?? now()) - takenMs;
    shown.forEach((node, i) => setText(body.rows[i].cells[3], duration(node.heartbeat_age_ms + Math.max(0, passedMs))));
  }

  async function load() {
    const nodes = [];
    let page;
    do {
      page = await ask("/v1/nodes", { cursor: page?.next_cursor });
      nodes.push(...page.nodes);
    } while (page.next_cursor && nodes.length < NODES_MAX);
    if (page.now_ms >= toldMs) take({ nodes, now_ms: page.now_ms });
    localTimes();
  }

  const reload = asking(mark, load);
  reload();
  const told = (news) => {
    toldMs = news.now_ms;
    take(news);
  };
  new Stream(mark, { nodes: told, reload });
  whileVisible(250, tick);
}
