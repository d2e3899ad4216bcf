"""`penstock grammar`: tries, tests and audits constraints, without a server."""
