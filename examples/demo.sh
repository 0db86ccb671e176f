#!/bin/sh
# The demo: two comparisons on the CPU with bundled data. `make demo` runs it.
set -eu

# In float64, equivalent strategies produce equal weights. In float32, rounding makes the weights differ. Two processes
# are faster with the large batch. With the small batch, communication takes more time than they save.
paceline compare classification --preset quick --epochs 3 --strategies single,ddp --devices 2 --batch-size 32,128 \
    --scale-lr linear --accelerator cpu --precision fp64 --set log_every='4 steps' --out runs/demo/strategies

# Small networks, small batches and a high learning rate: digits appear within 2.5 epochs, which take a few seconds.
paceline compare dcgan,dual_gan --preset quick --epochs 2.5 --strategies single --seeds 0,1 --jobs 2 \
    --accelerator cpu --batch-size 8 --lr 1e-3 --set ngf=12 --set ndf=8 --set ema_half_life='300 images' \
    --set evaluate_every='1.25 epochs' --set sample_every='1 epochs' --out runs/demo/generators

echo 'reports: runs/demo/strategies/report.html runs/demo/generators/report.html'
