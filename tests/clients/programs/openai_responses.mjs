// The openai package's Responses API for Node, streamed; the third argument is the field by which it goes on, if any.
import OpenAI from "openai";

const [base, question, field] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const parameters = { type: "object", properties: { query: { type: "string" } }, required: ["query"] };
const tools = [{ type: "function", name: "search", parameters, strict: false }];
const settings = { model: "gpt-5", instructions: "You search.", tools, store: Boolean(field) };
let input = [{ role: "user", content: question }];
let previous = {};
for (;;) {
  const response = await client.responses.stream({ ...settings, ...previous, input }).finalResponse();
  const calls = response.output.filter((item) => item.type === "function_call");
  if (!calls.length) {
    console.log(response.output_text);
    break;
  }
  const results = calls.map(({ call_id }) => ({ type: "function_call_output", call_id, output: "Ada wrote it" }));
  input = field ? results : [...input, ...response.output, ...results];
  previous = field ? { [field]: response.id } : {};
}
