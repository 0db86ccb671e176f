"""Evaluators, which compute metrics from predictions."""
