-- A worker says with which defaults it would enqueue each of its types, so that workers that differ are seen.
-- NULL: it did not say, being older than this.
ALTER TABLE windlass.worker ADD COLUMN defaults jsonb;
