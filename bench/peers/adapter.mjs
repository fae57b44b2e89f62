// The command line that every adapter in JavaScript has, and what every handler does: see adapter.py.

import fs from 'node:fs'
import path from 'node:path'
import process from 'node:process'
import { randomBytes } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'

const CALLERS = 100 // that enqueue concurrently
const CHUNK_BYTES = 20_000_000 // of payloads that one call enqueues
const EVERY = 20e6 // nanoseconds between two tasks whose latency is measured
const SAY_EVERY = 5 // milliseconds

export const now = () => Number(process.hrtime.bigint())

export function readOrder () {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      url: { type: 'string' },
      folder: { type: 'string' },
      'payload-bytes': { type: 'string', default: '0' },
      'sleep-ms': { type: 'string', default: '0' },
      'at-once': { type: 'string', default: '0' },
      within: { type: 'boolean', default: false }
    }
  })
  return {
    command: positionals[0],
    number: Number(positionals[1] ?? 0),
    url: values.url,
    folder: values.folder,
    payloadBytes: Number(values['payload-bytes']),
    sleepMs: Number(values['sleep-ms']),
    atOnce: Number(values['at-once']),
    within: values.within // enqueue in a transaction of the caller
  }
}

// How often handlers ran in this process, in a file that can be read meanwhile. A write for each
// handler would cost more than the handler: the numbers are written every few milliseconds.
class Tally {
  constructor (folder) {
    const name = path.join(folder, String(process.pid))
    this.file = fs.openSync(`${name}.tally`, 'w')
    this.starts = fs.openSync(`${name}.starts`, 'a')
    this.numbers = new BigInt64Array(5)
    this.numbers[0] = BigInt(process.pid)
    this.numbers[1] = process.hrtime.bigint()
    this.count = 0
    this.said = -1
    setInterval(() => this.say(), SAY_EVERY)
    this.say()
  }

  say () {
    if (this.said === this.count) return
    this.said = this.count
    this.numbers[4] = BigInt(this.count)
    fs.writeSync(this.file, this.numbers, 0, 40, 0)
  }

  hit (askedAt) {
    if (this.count === 0) {
      const { user, system } = process.cpuUsage()
      this.numbers[2] = process.hrtime.bigint()
      this.numbers[3] = BigInt(user + system) * 1000n
    }
    this.count++
    if (askedAt) fs.writeSync(this.starts, `${now() - askedAt}\n`)
  }
}

function * payloads (order) {
  const filler = order.payloadBytes
    ? { filler: randomBytes(order.payloadBytes).toString('base64url').slice(0, order.payloadBytes) }
    : {}
  for (let n = 0; n < order.number; n++) yield { n, ...filler }
}

const COMMANDS = {
  async bulk (adapter, order) {
    const wanted = [...payloads(order)]
    return timed(() => adapter.bulk(wanted, order))
  },

  async single (adapter, order) {
    await adapter.single({ n: 0 }) // connects, and prepares what it needs
    return timed(async () => {
      for (const payload of payloads(order)) await adapter.single(payload)
    })
  },

  async concurrent (adapter, order) {
    await adapter.single({ n: 0 })
    const wanted = payloads(order)
    const caller = async () => {
      for (let next = wanted.next(); !next.done; next = wanted.next()) await adapter.single(next.value)
    }
    return timed(() => Promise.all(Array.from({ length: CALLERS }, caller)))
  },

  async latency (adapter, order) {
    let nextAt = now()
    const until = nextAt + order.number * 1e9
    let sent = 0
    while (nextAt < until) {
      await adapter.single({ n: sent++, t: now() })
      nextAt += EVERY
      await sleep(Math.max(0, (nextAt - now()) / 1e6))
    }
    return { sent }
  }
}

async function timed (work) {
  const began = now()
  await work()
  return { seconds: (now() - began) / 1e9 }
}

// Divides them into what one call is to enqueue: so many, and fewer large ones.
export function * chunked (order, all, atMost) {
  const size = Math.max(1, Math.min(atMost, Math.floor(CHUNK_BYTES / (order.payloadBytes || 1))))
  for (let start = 0; start < all.length; start += size) yield all.slice(start, start + size)
}

export async function main (adapter) {
  const order = readOrder()
  if (order.command === 'work') {
    const tally = new Tally(order.folder)
    const note = payload => {
      tally.hit(payload.t)
      if (order.sleepMs) return sleep(order.sleepMs)
    }
    process.on('SIGTERM', () => process.exit(0))
    await adapter.work(order, note)
    return
  }
  await adapter.open(order)
  const answer = order.command === 'setup' ? {} : await COMMANDS[order.command](adapter, order)
  await adapter.close()
  console.log(JSON.stringify(answer))
  process.exit(0)
}
