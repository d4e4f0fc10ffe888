// Runs inside a page of the server's origin: clients that record everything they receive.

const RETRY_MS = 300; // between two attempts of a WebSocket, which does not reconnect by itself as an EventSource does

/** An EventSource, and everything it received. */
class Stream {
  records = []; // [topic, seq, data], in the order of arrival
  frames = []; // [event, topic, lastEventId]
  errors = []; // data of the server's frames of type `error`
  opened = 0;
  broken = 0; // connections that ended or failed

  constructor(url) {
    this.source = new EventSource(url);
    this.source.onopen = () => this.opened++;
    for (const name of ["record", "tombstone", "caught-up", "topic-deleted"])
      this.source.addEventListener(name, (event) => this.take(event));
    // Gets both the browser's own errors and the server's frames of that name; only the latter have data.
    this.source.onerror = (event) =>
      event.data === undefined ? this.broken++ : this.errors.push(JSON.parse(event.data));
  }

  take(event) {
    const frame = JSON.parse(event.data);
    this.frames.push([event.type, frame.topic, event.lastEventId]);
    for (const record of frame.records ?? []) this.records.push([frame.topic, record.$seq, record.data]);
  }

  get gaveUp() {
    return this.source.readyState === EventSource.CLOSED && "the EventSource gave up";
  }

  get summary() {
    const { opened, broken, errors, source, records, frames } = this;
    return { opened, broken, errors, state: source.readyState, records: records.slice(-9), frames: frames.slice(-9) };
  }
}

/** A WebSocket subscription to one topic. After a lost connection it subscribes again from its last position. */
class TopicSocket {
  records = []; // [topic, seq, data]
  froms = []; // from_seq of each subscription
  ops = []; // [connection, op] of all messages
  errors = [];
  closes = []; // codes
  cursor = 0;
  opened = 0;
  requests = 0;
  waiting = new Map(); // request_id → resolve

  constructor(topic) {
    this.topic = topic;
    this.connect();
  }

  connect() {
    this.socket = new WebSocket(`ws://${location.host}/v0/ws`);
    this.socket.onopen = () => {
      this.opened++;
      this.froms.push(this.cursor);
      this.subscribe();
    };
    this.socket.onmessage = (event) => this.take(JSON.parse(event.data));
    this.socket.onclose = (event) => {
      this.closes.push(event.code);
      setTimeout(() => this.connect(), RETRY_MS);
    };
  }

  /** Repeated while the topic's shard is starting (not_ready). */
  async subscribe() {
    const socket = this.socket;
    let answer;
    do {
      if (answer) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      if (socket !== this.socket || socket.readyState !== WebSocket.OPEN) return;
      answer = await this.ask({ op: "subscribe", topic: this.topic, from_seq: this.cursor });
    } while (answer.code === "not_ready");
  }

  ask(command) {
    const request_id = ++this.requests;
    this.socket.send(JSON.stringify({ ...command, request_id }));
    return new Promise((resolve) => this.waiting.set(request_id, resolve));
  }

  publish(...data) {
    return this.ask({ op: "publish", topic: this.topic, records: data.map((data) => ({ data })) });
  }

  take(message) {
    this.waiting.get(message.request_id)?.(message);
    if (message.code === "not_ready") return; // the caller retries
    this.ops.push([this.opened, message.op]);
    if (message.op === "error") this.errors.push(message);
    if (message.op !== "record") return;
    this.cursor = message.to_seq;
    for (const record of message.records) this.records.push([message.topic, record.$seq, record.data]);
  }

  get summary() {
    const { opened, froms, errors, closes, records, ops } = this;
    return { opened, froms, errors, closes, records: records.slice(-9), ops: ops.slice(-9) };
  }
}

/** The answer to POST /v0/watch. */
async function watch(body, token) {
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch("/v0/watch", { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await response.json();
  if (!response.ok) throw new Error(`${response.status} ${JSON.stringify(answer)}`);
  return answer;
}
