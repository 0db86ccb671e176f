"""Built-in evaluators, one per file; the file name is the evaluator's name."""
