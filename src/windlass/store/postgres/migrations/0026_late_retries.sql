-- A retry that is put off until it is too old, or until retries of its type are stopped, ends.

-- why_not_again: why no other attempt of a task is to begin after so many seconds, if there is a reason: retries of its
-- type are stopped, for the reason that is given, or it would be too old. An expression, and volatile as the clock: so
-- it is put in where it is called.
CREATE FUNCTION windlass.why_not_again(
    task windlass.task, stopped text, delay double precision, max_age double precision
) RETURNS text
LANGUAGE sql
AS $$
SELECT CASE
    WHEN stopped IS NOT NULL THEN 'retries of this type are stopped: ' || stopped
    WHEN windlass.clock() + coalesce(delay, 0) * interval '1 second'
        > windlass.tried_since(task) + max_age * interval '1 second'
        THEN format('its next attempt would begin more than %s s after it was enqueued', max_age)
END
$$;

-- settle_failures: as before, and ends retries that were put off for too long. They have used no attempt.
CREATE OR REPLACE FUNCTION windlass.settle_failures(
    tokens uuid[], which smallint[], task_ids uuid[], generations integer[], started_after double precision[],
    outcomes text[], results text[], delays double precision[], errors text[], reported boolean[],
    retention interval, dead_retention interval, key_retention interval, patience interval,
    max_ages double precision[], calls_back boolean
) RETURNS TABLE (ordinal integer, before boolean, given_up boolean)
LANGUAGE plpgsql
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    asked constant text[] := outcomes;
    missed integer[];
    befores boolean[];
    late record;
    too_late integer[] := '{}';
BEGIN
    IF outcomes && '{retried}' AND (max_ages IS NOT NULL OR EXISTS (SELECT FROM windlass.stopped_type)) THEN
        SELECT
            array_agg(CASE WHEN g.why IS NULL THEN u.outcome ELSE 'dead' END ORDER BY u.ordinal),
            array_agg(CASE WHEN g.why IS NULL THEN u.error
                ELSE (u.error::jsonb || jsonb_build_object('given_up', g.why))::text END ORDER BY u.ordinal)
        INTO outcomes, errors
        FROM unnest(task_ids, outcomes, delays, errors, max_ages) WITH ORDINALITY
            AS u (task_id, outcome, delay, error, max_age, ordinal)
        LEFT JOIN LATERAL (
            SELECT windlass.why_not_again(t, s.reason, u.delay, u.max_age) AS why
            FROM windlass.task t
            LEFT JOIN windlass.stopped_type s ON s.type = t.type
            WHERE u.outcome = 'retried' AND t.id = u.task_id
                AND NOT EXISTS (SELECT FROM windlass.cancel_request q WHERE q.task_id = u.task_id)
        ) g ON true;
    END IF;

    SELECT coalesce(array_agg(b.ordinal), '{}'), coalesce(array_agg(b.before), '{}') INTO missed, befores
    FROM windlass.settle_batch(
        tokens, which, task_ids, generations, started_after, outcomes, results, delays, errors, reported,
        retention, dead_retention, key_retention, patience
    ) b;

    -- A retry that was put off, by a breaker or its budget, says so: it may be too old by then, or not be wanted.
    IF outcomes && '{snoozed}' AND errors IS NOT NULL
        AND (max_ages IS NOT NULL OR EXISTS (SELECT FROM windlass.stopped_type)) THEN
        FOR late IN
            SELECT u.task_id, u.ordinal::integer - 1 AS ordinal, tokens[coalesce(u.which, 1)] AS token,
                g.why || '; put off: ' || (u.error::jsonb ->> 'message') AS why
            FROM unnest(which, task_ids, outcomes, delays, errors, max_ages) WITH ORDINALITY
                AS u (which, task_id, outcome, delay, error, max_age, ordinal)
            JOIN windlass.task t ON t.id = ANY (ARRAY[u.task_id])
            LEFT JOIN windlass.stopped_type s ON s.type = t.type
            CROSS JOIN LATERAL (SELECT windlass.why_not_again(t, s.reason, u.delay, u.max_age) AS why) g
            WHERE u.outcome = 'snoozed' AND u.error IS NOT NULL AND g.why IS NOT NULL
                AND u.ordinal - 1 <> ALL (missed)
        LOOP
            DELETE FROM windlass.scheduled w WHERE w.task_id = late.task_id;
            DELETE FROM windlass.ready r WHERE r.task_id = late.task_id;
            PERFORM windlass.bury_tasks(ARRAY[late.task_id], late.why, late.token, dead_retention, key_retention);
            too_late := too_late || late.ordinal;
        END LOOP;
    END IF;

    IF outcomes && '{snoozed,released}' AND EXISTS (SELECT FROM windlass.expiry) THEN
        PERFORM windlass.forget_expiry(ARRAY(
            SELECT u.task_id
            FROM unnest(task_ids, outcomes, started_after) WITH ORDINALITY
                AS u (task_id, outcome, started_after, ordinal)
            WHERE u.outcome IN ('snoozed', 'released') AND u.started_after IS NOT NULL
                AND u.ordinal - 1 <> ALL (missed)
        ));
    END IF;

    IF calls_back THEN
        PERFORM windlass.call_back(array_agg(u.task_id))
        FROM unnest(task_ids, outcomes) WITH ORDINALITY AS u (task_id, outcome, ordinal)
        WHERE coalesce(u.outcome, 'completed') IN ('completed', 'failed', 'dead')
            AND u.ordinal - 1 <> ALL (missed)
        HAVING count(*) > 0;
    END IF;
    RETURN QUERY
    SELECT m.ordinal, m.before, false FROM unnest(missed, befores) AS m (ordinal, before)
    UNION ALL
    SELECT u.ordinal::integer - 1, false, true
    FROM unnest(asked, outcomes) WITH ORDINALITY AS u (asked, outcome, ordinal)
    WHERE u.asked = 'retried' AND u.outcome = 'dead' AND u.ordinal - 1 <> ALL (missed)
    UNION ALL
    SELECT u.ordinal, false, true FROM unnest(too_late) AS u (ordinal);
END
$$;
