"""The composition root: which services a backbone and a worker run, under one nursery each. No logic."""
