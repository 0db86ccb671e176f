"""Launch runs: worker processes under torchrun's agent, SLURM jobs and Kubernetes jobs."""
