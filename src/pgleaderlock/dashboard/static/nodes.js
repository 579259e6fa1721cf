// The page of the nodes.

import { askAll, byId, localTimes, now, plural, setText, whileVisible } from "./core.js";
import { Mark, Stream, asking } from "./live.js";
import { colourAll } from "./colours.js";
import { filled, swap, tick } from "./rows.js";

const NODES_MAX = 2000;

function stateOf(node) {
  if (node.state !== "alive") return node.state;
  if (node.name_shared) return "shares its name";
  return node.candidate ? "alive" : "observes";
}

const valuesOf = (node, nowMs) => ({ ...node, key: node.session_id, state: stateOf(node), heard_ms: nowMs - node.heartbeat_age_ms });

const inOrder = (a, b) => a.live - b.live || (a.node_id < b.node_id ? -1 : a.node_id > b.node_id ? 1 : a.session_id - b.session_id);

export function start() {
  const body = byId("nodes").tBodies[0];
  const mark = new Mark();
  let toldMs = 0; // by the stream, which may overtake an answer

  function take({ nodes, now_ms: nowMs }) {
    colourAll(nodes.map((node) => node.node_id));
    const shown = [...nodes].sort(inOrder);
    swap(body, shown.map((node) => filled(valuesOf(node, nowMs), mark.staleMs ?? now())));
    const most = Math.max(1, ...shown.map((node) => node.roles));
    shown.forEach((node, i) => {
      body.rows[i].querySelector(".share i").style.width = `${(100 * node.roles) / most}%`;
    });
    byId("nothing").hidden = shown.length > 0;
    byId("more")?.remove();
    const counted = (state) => shown.filter((node) => node.state === state).length;
    const others = ["starting", "draining", "drained", "silent", "ended"].filter(counted).map((state) => `${counted(state)} ${state}`);
    setText(byId("facts"), [plural(shown.filter((node) => node.live).length, "live node"), ...others].join(", "));
  }

  async function load() {
    const answer = await askAll("/v1/nodes", "nodes", NODES_MAX);
    if (answer.now_ms >= toldMs) take(answer);
    localTimes();
  }

  const reload = asking(mark, load);
  reload();
  const told = (news) => {
    toldMs = news.now_ms;
    take(news);
  };
  new Stream(mark, { nodes: told, reload });
  whileVisible(250, () => tick(body, mark.staleMs ?? now()));
}
