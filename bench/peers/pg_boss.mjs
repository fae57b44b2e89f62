// pg-boss, with its best settings: batches of 2000, two at once, woken by notifications.
// Its handler is given a batch, and the batch is completed as one.

import { PgBoss } from 'pg-boss'

import { chunked, main } from './adapter.mjs'

const BATCH = 2000
const AT_ONCE = 2
const CHUNK = 5000 // tasks of one call
const QUEUE = 'notes'

async function start (options) {
  const boss = new PgBoss({ max: 10, ...options })
  boss.on('error', console.error)
  await boss.start()
  return boss
}

const adapter = {
  async open (order) {
    this.boss = await start({ connectionString: order.url, supervise: false, schedule: false })
    if (order.command === 'setup') await this.boss.createQueue(QUEUE, { notify: true })
  },

  async close () {
    await this.boss.stop({ graceful: false })
  },

  async bulk (payloads, order) {
    for (const chunk of chunked(order, payloads, CHUNK)) {
      await this.boss.insert(QUEUE, chunk.map(data => ({ data })))
    }
  },

  async single (payload) {
    await this.boss.send(QUEUE, payload)
  },

  async work (order, note) {
    const boss = await start({ connectionString: order.url, useListenNotify: true })
    const options = {
      batchSize: order.atOnce ? order.atOnce / AT_ONCE : BATCH,
      localConcurrency: AT_ONCE,
      pollingIntervalSeconds: 0.5,
      burstWhenBatchFull: true
    }
    await boss.work(QUEUE, options, async jobs => {
      await Promise.all(jobs.map(job => note(job.data)))
    })
  }
}

await main(adapter)
