// Ollama's JavaScript package: models, chat, streams, a schema, a tool, an error.
const { readFileSync } = require('fs')
const { dirname, join } = require('path')
const { Ollama } = require('ollama')

const file = join(dirname(require.resolve('ollama')), '..', 'package.json')
console.log(`ollama ${JSON.parse(readFileSync(file)).version}`)
const URL = process.env.GREENROOM_URL
const ollama = new Ollama({ host: URL })
const greet = {
  type: 'function',
  function: {
    name: 'greet',
    description: 'Return a greeting.',
    parameters: {
      type: 'object',
      properties: { language: { type: 'string', enum: ['English', 'German'] } },
      required: ['language'],
      additionalProperties: false,
    },
  },
}
const mood = {
  type: 'object',
  properties: { mood: { type: 'string', enum: ['good', 'bad'] } },
  required: ['mood'],
  additionalProperties: false,
}
const call = { function: { name: 'greet', arguments: { language: 'English' } } }
const question = [{ role: 'user', content: 'Hello' }]
const common = { model: 'demo', options: { temperature: 0, num_predict: 30 } }

async function print(stream, text) {
  let last
  for await (const part of stream) {
    process.stdout.write(text(part))
    last = part
  }
  console.log(`\n${last.done_reason}: ${last.prompt_eval_count} + ${last.eval_count} tokens`)
}

async function main() {
  console.log(await ollama.version())
  console.log((await ollama.list()).models.map((model) => model.name))
  console.log((await ollama.show({ model: 'demo' })).capabilities)
  console.log((await ollama.chat({ ...common, messages: question })).message.content)
  const chat = await ollama.chat({ ...common, messages: question, stream: true })
  await print(chat, (part) => part.message.content)
  const generate = await ollama.generate({ ...common, prompt: 'Hello', stream: true })
  await print(generate, (part) => part.response)
  const film = [{ role: 'user', content: 'A lovely film.' }]
  console.log((await ollama.chat({ ...common, messages: film, format: mood })).message.content)
  const answered = [
    ...question,
    { role: 'assistant', content: '', tool_calls: [call] },
    { role: 'tool', content: 'Hello!', tool_name: 'greet' },
  ]
  const looped = { ...common, messages: answered, tools: [greet] }
  console.log((await ollama.chat(looped)).message.content)
  console.log((await ollama.ps()).models.map((model) => model.name))
  const refused = await ollama.pull({ model: 'llama3.2' }).catch((error) => error)
  console.log(`${refused.status_code} ${refused.message}`)
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
