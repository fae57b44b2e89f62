-- unknown_types: the types of ready tasks that no registered worker knows.
SELECT windlass.unknown_types()
