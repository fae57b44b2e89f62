-- answer_calls: look at gates that were called; returns how many calls that were. $1 limit, $2 all_of_them
SELECT windlass.answer_calls($1, $2) FROM windlass.call_changed()
