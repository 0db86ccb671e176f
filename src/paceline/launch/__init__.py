"""Child processes, torchrun, SLURM, Kubernetes."""
