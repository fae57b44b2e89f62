-- is_keyword: whether SQL keeps this word to itself, so that it would need quotes as a name.
-- $1 word
SELECT EXISTS (
    SELECT
    FROM pg_get_keywords()
    WHERE word = $1 AND catcode <> 'U'
)
