// The Vercel AI SDK with its default provider of OpenAI (Responses) or with that of Anthropic, streamed, or an object of a type.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [base, question, provider] = process.argv.slice(2);
const model =
  provider === "anthropic"
    ? createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" })("claude-sonnet-4-5")
    : createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" })("gpt-5");
const search = tool({
  description: "Find mails.",
  inputSchema: z.object({ query: z.string() }),
  execute: async ({ query }) => `Ada wrote about ${query}`,
});
if (provider === "object") {
  const schema = z.object({ answer: z.string() });
  console.log((await generateObject({ model, schema, prompt: question })).object.answer);
  process.exit();
}
const result = streamText({ model, system: "You search. Say what you do.", prompt: question, tools: { search }, stopWhen: stepCountIs(5) });
console.log(await result.text);
