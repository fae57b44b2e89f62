-- create_schema: the schema and the table of applied migrations. Safe to repeat.
CREATE SCHEMA IF NOT EXISTS SCHEMA_NAME;
CREATE TABLE IF NOT EXISTS windlass.migration (
    number integer PRIMARY KEY,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
