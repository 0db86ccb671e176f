"""Training: the components of a run, the loop, the step and the learners."""
