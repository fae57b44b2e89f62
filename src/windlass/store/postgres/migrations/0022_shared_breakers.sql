-- Circuit breakers whose state workers share. One that never opened has no row.
CREATE TABLE windlass.breaker (
    name text PRIMARY KEY,
    epoch bigint NOT NULL,  -- grows whenever it opens or closes: an older one changes nothing
    half_open_at timestamptz,  -- NULL: it is closed
    opened_for interval CHECK ((opened_for IS NULL) = (half_open_at IS NULL)),  -- tells a clock that was set back
    prober uuid,  -- whose trials decide
    prober_until timestamptz
);

-- Who may read tasks may read this. Only workers write it, and they own the tables.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role
        FROM pg_class c
        CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'windlass.task'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'SELECT'
    LOOP
        EXECUTE format('GRANT SELECT ON windlass.breaker TO %s', granted.role);
    END LOOP;
END
$$;
