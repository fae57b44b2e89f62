-- limit_search: let no pattern keep the server busy for long, until the transaction ends; and raise if it is
-- none, also where there is nothing to search. $1 milliseconds, $2 pattern
SELECT set_config('statement_timeout', $1::integer::text, true), '' ~ $2::text
