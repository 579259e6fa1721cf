// Whether what is shown is true: the mark in the corner, the bar below it, and the stream of news that both depend on.
//
// The stream is read with fetch instead of EventSource: that one hides the server's pings, and then a connection that
// is open and dead looks like a quiet night.

import { byId, clockText, now, oneAtATime, parsed, setNow, setText, signIn } from "./core.js";

const SILENCE_MS = 12_000; // the server pings every 5 s
const RETRY_MS = [250, 500, 1000, 2000, 4000];
const ASK_AGAIN_MS = 2000;
const DATA = new Set(["leaders", "nodes", "event", "fresh"]); // what a server says only while it sees its database
const HIDDEN_MS = 30_000; // a browser has few connections for one server: a page that is out of sight gives its own back

export class Mark {
  #heardMs = now();
  #staleMs = null;
  #told = false; // this connection has told how things are
  #unanswered = new Set();
  #changed;

  // `changed` is called when what is shown has become stale, or is true again.
  constructor(changed = () => {}) {
    this.#changed = changed;
    setText(byId("live"), "connecting");
  }

  // The server has said something, if only that it is there.
  heard() {
    this.#heardMs = now();
    if (this.#told && !this.#unanswered.size && document.body.dataset.live !== "live") {
      this.#staleMs = null;
      document.body.dataset.live = "live";
      setText(byId("live"), "live");
      byId("stale").hidden = true;
      this.#changed();
    }
  }

  // It has said how things are. Before that nothing is live.
  told() {
    this.#told = true;
    this.heard();
  }

  // A question of this page has been answered, or still waits for that: what is shown without it is not the truth.
  answered(question) {
    if (this.#unanswered.delete(question)) this.heard();
  }

  unanswered(question, why) {
    this.#unanswered.add(question);
    this.lost(why);
  }

  // Since when nothing new is known; null while all is well.
  get staleMs() {
    return this.#staleMs;
  }

  // The stream has stopped, until it says again how things are.
  cut(why, sinceMs = this.#heardMs) {
    this.#told = false;
    this.lost(why, sinceMs);
  }

  lost(why, sinceMs = this.#heardMs) {
    if (this.#staleMs === null) {
      this.#staleMs = sinceMs;
      document.body.dataset.live = "stale";
      setText(byId("live"), `stale since ${clockText(sinceMs)}`);
      this.#changed();
    }
    const text = `Stale since ${clockText(this.#staleMs)}: ${why}. What you see is from then; trying again.`;
    setText(byId("stale"), text);
    byId("stale").hidden = false;
  }
}

// A page's questions to the API: asked again until they are answered, unless they are refused.
export function asking(mark, load) {
  let timer = 0;
  const run = oneAtATime(async () => {
    clearTimeout(timer);
    try {
      await load();
      mark.answered(run);
    } catch (error) {
      if (error.status < 500) {
        mark.answered(run);
        mark.lost(error.message);
      } else {
        mark.unanswered(run, error.status ? error.message : "the server cannot be reached");
        timer = setTimeout(run, ASK_AGAIN_MS);
      }
    }
  });
  return run;
}

export class Stream {
  #begun = false;
  #retries = 0;
  #lastId = "";
  #abort = null;
  #timer = 0;
  #hiddenTimer = 0;

  // `on`: what to do with each kind of news, by its name. When it begins it tells who leads and which nodes there are;
  // `again` is called when it begins again, for what happened in between.
  constructor(mark, on, again = () => {}) {
    this.mark = mark;
    this.again = again;
    this.on = {
      stale: (news) => mark.cut("the server cannot reach its database", news.since_ms),
      end: () => mark.cut("the server stops"),
      ...on,
    };
    document.addEventListener("visibilitychange", () => this.#visibility());
    this.#run();
  }

  #visibility() {
    clearTimeout(this.#hiddenTimer);
    if (document.hidden) {
      this.#hiddenTimer = setTimeout(() => this.#abort?.abort("hidden"), HIDDEN_MS);
    } else if (this.#abort === null) {
      clearTimeout(this.#timer);
      this.#run();
    }
  }

  async #run() {
    const abort = (this.#abort = new AbortController());
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort("silent"), SILENCE_MS);
      this.mark.heard();
    };
    try {
      silence = setTimeout(() => abort.abort("silent"), SILENCE_MS);
      const headers = { accept: "text/event-stream" };
      if (this.#lastId) headers["last-event-id"] = this.#lastId;
      const answer = await fetch("/v1/events", { headers, signal: abort.signal, cache: "no-store" });
      if (answer.status === 401) return signIn();
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      this.#retries = 0;
      heard();
      if (this.#begun) this.again();
      this.#begun = true;
      await this.#read(answer.body.getReader(), heard);
      this.mark.cut("the server has ended the stream");
    } catch (error) {
      if (abort.signal.reason === "hidden") {
        this.mark.cut("this page was out of sight");
      } else {
        const silent = abort.signal.reason === "silent";
        const answers = error.message?.startsWith("the server answers");
        this.mark.cut(silent ? "the server is silent" : answers ? error.message : "the server cannot be reached");
      }
    } finally {
      clearTimeout(silence);
      this.#abort = null;
    }
    if (!document.hidden) {
      const wait = RETRY_MS[Math.min(this.#retries++, RETRY_MS.length - 1)];
      this.#timer = setTimeout(() => this.#run(), wait * (0.75 + Math.random() / 2));
    }
    return undefined;
  }

  async #read(reader, heard) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const messages = (rest + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      rest = messages.pop();
      messages.forEach((message) => this.#take(message));
    }
  }

  #take(message) {
    let kind = "message";
    const data = [];
    for (const line of message.split(/\r?\n/)) {
      const colon = line.indexOf(":");
      if (colon <= 0) continue; // a comment: the ping
      const value = line.slice(colon + 1).replace(/^ /, "");
      const field = line.slice(0, colon);
      if (field === "event") kind = value;
      else if (field === "data") data.push(value);
      else if (field === "id") this.#lastId = value;
    }
    if (!data.length) return;
    const news = parsed(data.join("\n"));
    if (news === null) return;
    setNow(news.now_ms);
    this.on[kind]?.(news);
    if (DATA.has(kind)) this.mark.told();
  }
}
