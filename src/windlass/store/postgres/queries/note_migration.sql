-- note_migration: remember that a migration was applied. NUMBER and NAME are put in by the caller.
INSERT INTO windlass.migration (number, name) VALUES (NUMBER, 'NAME')
