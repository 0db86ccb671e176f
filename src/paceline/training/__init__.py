"""The hot path: build, loop, step, learners."""
