"""Launch runs in worker processes, with torchrun's agent, on SLURM or on Kubernetes."""
