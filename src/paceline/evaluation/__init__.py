"""How predictions are measured."""
