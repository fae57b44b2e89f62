-- is_template: whether a template was made and finished. $1 name
SELECT datistemplate FROM pg_database WHERE datname = $1
