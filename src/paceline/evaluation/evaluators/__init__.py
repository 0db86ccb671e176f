"""Evaluators: the name of a file here is the name of an evaluator."""
