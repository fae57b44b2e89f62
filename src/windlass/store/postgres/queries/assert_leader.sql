-- assert_leader: hold the seat for this transaction, or raise. $1 holder, $2 term
-- While it is held nobody else can be elected, so each statement, and each pause between two, ends
-- with the term at the latest: also if the leader has vanished, or does not answer any more. A pause
-- between the parts of one statement is ended by servers from 17 on, and by keepalives before.
WITH seat AS MATERIALIZED (
    SELECT windlass.assert_leader($1, $2)
), remaining AS MATERIALIZED (
    SELECT least(2147483647, greatest(1, ceil(
        1000 * extract(epoch FROM l.expires_at - windlass.clock())
    )))::bigint::text AS ms
    FROM seat, windlass.leadership l
)
SELECT
    set_config('statement_timeout', r.ms, true),
    set_config('idle_in_transaction_session_timeout', r.ms, true),
    CASE WHEN current_setting('server_version_num')::int >= 170000
        THEN set_config('transaction_timeout', r.ms, true) END
FROM remaining r
