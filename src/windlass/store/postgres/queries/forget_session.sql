-- forget_session: leave nothing in a session of what a handler may have done to it.
-- What the driver has prepared stays, and what it set when it connected.
SELECT pg_advisory_unlock_all();
CLOSE ALL;
UNLISTEN *;
RESET SESSION AUTHORIZATION;
RESET ALL;
DISCARD TEMP;
