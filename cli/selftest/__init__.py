"""`penstock selftest`: greedy answers are the same however they are computed."""
