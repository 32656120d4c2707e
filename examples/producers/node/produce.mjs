// Publishes one trajectory: `npm install && node produce.mjs SESSION [HOST:PORT]`.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { Kafka, Partitioners, logLevel } from "kafkajs";

const [session, bus = "127.0.0.1:9092"] = process.argv.slice(2);
if (!session) throw new Error("usage: node produce.mjs SESSION [HOST:PORT]");

// The Kafka key of everything about a session: the first 80 bits of SHA-256, as lower-case base32.
function sessionKey(sessionId, tenant = "default") {
  const digest = createHash("sha256").update(`${tenant}\0${sessionId}`).digest("hex");
  const bits = BigInt(`0x${digest.slice(0, 20)}`);
  const letter = (index) => "abcdefghijklmnopqrstuvwxyz234567"[Number((bits >> BigInt(75 - 5 * index)) & 31n)];
  return Array.from({ length: 16 }, (_, index) => letter(index)).join("");
}

const event = JSON.parse(readFileSync(new URL("../trajectory.json", import.meta.url)));
const now = new Date().toISOString();
Object.assign(event, { time: now, started_at: now, session_id: session, trajectory_id: session });
event.session_key = sessionKey(session);
event.branches[0].spans[0].turn_id = `${session}-1`;

// DefaultPartitioner is Kafka's own murmur2: events of a session have to meet on one partition.
// The embedded broker's password is in .headrace/run/token.
const { HEADRACE_BUS__USERNAME: username = "headrace", HEADRACE_BUS__PASSWORD: password } = process.env;
const sasl = password ? { mechanism: "plain", username, password } : undefined;
const kafka = new Kafka({ brokers: bus.split(","), sasl, logLevel: logLevel.ERROR });
const producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner });
await producer.connect();
const [sent] = await producer.send({
  topic: "trajectories",
  acks: -1,
  messages: [{ key: event.session_key, value: JSON.stringify(event) }],
});
await producer.disconnect();
console.log(`${session} is at trajectories[${sent.partition}]@${sent.baseOffset}`);
