// graphile-worker, with its best settings: 200 jobs at once, a local queue of 1000, completions
// batched for 10 ms, six connections.

import { Logger, makeWorkerUtils, run } from 'graphile-worker'
import pg from 'pg'

import { chunked, main } from './adapter.mjs'

const AT_ONCE = 200
const LOCAL_QUEUE = 1000
const BATCH_DELAY = 10 // milliseconds
const CONNECTIONS = 6
const CHUNK = 5000 // tasks of one call
const ADD_JOB = 'SELECT graphile_worker.add_job($1, payload => $2::json)'
const logger = new Logger(() => () => {})

const adapter = {
  async open (order) {
    this.pool = new pg.Pool({ connectionString: order.url, max: 10 })
    this.utils = await makeWorkerUtils({ pgPool: this.pool, logger })
    if (order.command === 'setup') await this.utils.migrate()
    if (order.within) this.caller = await this.pool.connect()
  },

  async close () {
    this.caller?.release()
    await this.utils.release()
    await this.pool.end()
  },

  async bulk (payloads, order) {
    for (const chunk of chunked(order, payloads, CHUNK)) {
      await this.utils.addJobs(chunk.map(payload => ({ identifier: 'note', payload })))
    }
  },

  async single (payload) {
    if (!this.caller) {
      await this.utils.addJob('note', payload)
      return
    }
    await this.caller.query('BEGIN')
    await this.caller.query(ADD_JOB, ['note', JSON.stringify(payload)])
    await this.caller.query('COMMIT')
  },

  async work (order, note) {
    await run({
      preset: {
        worker: {
          connectionString: order.url,
          concurrentJobs: order.atOnce || AT_ONCE,
          maxPoolSize: CONNECTIONS,
          localQueue: { size: Math.max(LOCAL_QUEUE, order.atOnce) },
          completeJobBatchDelay: BATCH_DELAY,
          failJobBatchDelay: BATCH_DELAY
        }
      },
      logger,
      noHandleSignals: true,
      taskList: { note }
    })
  }
}

await main(adapter)
