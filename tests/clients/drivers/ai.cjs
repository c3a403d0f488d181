// Vercel's AI SDK over OpenAI's two APIs and Anthropic's: text, stream, object, a tool loop.
const { generateObject, generateText, stepCountIs, streamText, tool } = require('ai')
const { createAnthropic } = require('@ai-sdk/anthropic')
const { createOpenAI } = require('@ai-sdk/openai')
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible')
const { z } = require('zod')

const packages = ['ai', '@ai-sdk/openai-compatible', '@ai-sdk/openai', '@ai-sdk/anthropic']
console.log(packages.map((name) => `${name} ${require(`${name}/package.json`).version}`).join(', '))
const url = process.env.GREENROOM_URL
const compatible = createOpenAICompatible({
  name: 'greenroom',
  baseURL: `${url}/v1`,
  supportsStructuredOutputs: true,
})
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })
const greet = tool({
  description: 'Return a greeting.',
  inputSchema: z.strictObject({ language: z.enum(['English', 'German']) }),
  execute: async ({ language }) => (language === 'English' ? 'Hello!' : 'Hallo!'),
})
const review = z.object({ mood: z.enum(['good', 'bad']) })

async function main() {
  for (const model of [compatible('demo'), openai('demo'), anthropic('demo')]) {
    const common = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 }
    console.log((await generateText({ ...common, prompt: 'Hello' })).text)
    const streamed = streamText({ ...common, system: 'Be kind.', prompt: 'Hello' })
    for await (const text of streamed.textStream) process.stdout.write(text)
    console.log()
    console.log((await generateObject({ ...common, schema: review, prompt: 'A lovely film.' })).object)
    const looped = streamText({
      ...common,
      prompt: 'Hello',
      tools: { greet },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'none' : 'required' }),
      stopWhen: stepCountIs(2),
    })
    console.log(await looped.text)
  }
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
