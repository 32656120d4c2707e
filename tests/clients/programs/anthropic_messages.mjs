// The anthropic package for Node, streamed.
import Anthropic from "@anthropic-ai/sdk";

const [base, question] = process.argv.slice(2);
const client = new Anthropic({ baseURL: base, apiKey: "none" });
const input_schema = { type: "object", properties: { query: { type: "string" } }, required: ["query"] };
const tools = [{ name: "search", input_schema }];
const messages = [{ role: "user", content: question }];
for (;;) {
  const body = { model: "claude-sonnet-4-5", max_tokens: 500, system: "You search.", messages, tools };
  const message = await client.messages.stream(body).finalMessage();
  messages.push({ role: "assistant", content: message.content });
  if (message.stop_reason !== "tool_use") {
    console.log(message.content.at(-1).text);
    break;
  }
  const calls = message.content.filter((block) => block.type === "tool_use");
  const content = calls.map((block) => ({ type: "tool_result", tool_use_id: block.id, content: "Ada wrote it" }));
  messages.push({ role: "user", content });
}
