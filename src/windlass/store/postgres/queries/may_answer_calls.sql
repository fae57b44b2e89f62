-- may_answer_calls: whether this session may write, and its role whatever answer_calls does. Asked before it is
-- called by whoever only wants to look. A standby is as read-only as a session that is told to be so.
SELECT
    current_setting('transaction_read_only') = 'off'
    AND has_function_privilege('windlass.answer_calls(integer, boolean)'::regprocedure, 'EXECUTE')
    AND (
        SELECT bool_and(has_table_privilege(t.relation, w.needed))
        FROM (VALUES
            ('windlass.gate_call'::regclass, '{INSERT, UPDATE, DELETE}'::text[]),
            ('windlass.gate', '{INSERT, UPDATE, DELETE}'),
            ('windlass.gate_entry', '{INSERT, UPDATE, DELETE}'),
            ('windlass.value_rule_change', '{UPDATE, DELETE}'),
            ('windlass.scheduled', '{INSERT}'),
            ('windlass.ready', '{INSERT}'),
            ('windlass.lane', '{INSERT}')
        ) AS t (relation, rights)
        CROSS JOIN LATERAL unnest(t.rights) AS w (needed)
    )
