-- learn_types: every array type that our statements use, for a driver that looks them up when first met.
-- $1 to $8: an empty array of each
SELECT
    $1::uuid[], $2::text[], $3::smallint[], $4::integer[], $5::bigint[], $6::float8[],
    $7::boolean[], $8::timestamptz[]
