"""What all tests share: one thread per process, since small networks on several threads only wait for each other."""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
