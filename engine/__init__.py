"""Tokens and tensors: everything between a list of token ids and the events a model's answer consists of. Knows no HTTP."""
