// The openai package for Node: chat completions, streamed.
import OpenAI from "openai";

const [base, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const parameters = { type: "object", properties: { query: { type: "string" } }, required: ["query"] };
const tools = [{ type: "function", function: { name: "search", parameters } }];
const messages = [{ role: "system", content: "You search." }, { role: "user", content: question }];
for (;;) {
  const stream = client.chat.completions.stream({ model: "gpt-5", messages, tools });
  const message = (await stream.finalChatCompletion()).choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content);
    break;
  }
  for (const call of message.tool_calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: "Ada wrote it" });
  }
}
