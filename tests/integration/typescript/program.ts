// Reads records, works on a job and handles errors, with the types that openapi-typescript makes of the document.
import createClient from "openapi-fetch";
import type { components, paths } from "./topics";

type Code = components["schemas"]["ErrorDetail"]["code"];
const client = createClient<paths>({ baseUrl: "http://127.0.0.1:4000" });

export async function write(topic: string): Promise<number> {
  const body = { records: [{ data: { a: 1 }, tag: "eu" }] };
  const { data, error } = await client.POST("/v0/topics/{topic}", { params: { path: { topic } }, body });
  if (error) throw new Error(error.error.message);
  return data.last_seq;
}

export async function read(topic: string): Promise<{ seq: number; tag?: string; data: unknown }[]> {
  const { data, error } = await client.POST("/v0/topics/{topic}/diff", {
    params: { path: { topic } },
    body: { from_seq: 0, include_tags: true },
  });
  if (error) throw new Error(`${error.error.code}: ${error.error.message}`);
  const lost: number | undefined = data.tombstone?.gap_from;
  const next: number = data.next_from_seq;
  // @ts-expect-error: records are not of any type
  data.records[0].sequence;
  console.log(lost, next, new Date(data.records[0].$ts));
  return data.records.map((record) => ({ seq: record.$seq, tag: record.$tag, data: record.data }));
}

export async function work(topic: string): Promise<number> {
  const path = { topic };
  const { data, error } = await client.POST("/v0/topics/{topic}/claim", { params: { path }, body: { node: "n1", max: 2 } });
  if (error) {
    const code: Code = error.error.code;
    // @ts-expect-error: not a code of the server
    if (code === "not_a_topic") return 1;
    return code === "not_a_queue" ? 0 : -1;
  }
  for (const job of data.claimed) {
    const body = { node: "n1", seqs: [job.$seq], lease_ids: job.lease_id ? [job.lease_id] : [] };
    const acked = await client.POST("/v0/topics/{topic}/ack", { params: { path }, body });
    console.log(job.deliveries, acked.data?.skipped);
  }
  return data.count;
}

export async function configure(topic: string): Promise<"ephemeral" | "memory" | "disk" | "fsync" | undefined> {
  const { data } = await client.PUT("/v0/topics/{topic}", { params: { path: { topic } }, body: { type: "queue" } });
  return data?.config.durability;
}
