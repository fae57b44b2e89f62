-- echo: send a word to whoever waits to hear it, and wake nobody. $1 word
SELECT pg_notify('windlass.echo', $1)
