"""Example commands for `--help`, one per line. Two spaces and a number sign start a comment."""

EXAMPLES = {
    "train": """\
paceline train classification --preset quick  # a first run: takes seconds on a CPU
paceline train classification --data folder --data-root photos --epochs 30  # your own images, one folder per class
paceline train dcgan --preset quick --devices 2 --accelerator cpu  # two processes
paceline train classification --preset quick --lr 0.05 --name lower-lr  # another run, in runs/lower-lr
paceline train ./my_recipe.py --set width=32  # your own recipe""",
    "evaluate": """\
paceline evaluate runs/first
paceline evaluate runs/first --split validation --checkpoint last
paceline evaluate runs/first --data folder --data-root photos  # other images""",
    "verify": """\
paceline verify classification
paceline verify dcgan --strategies single,fsdp --steps 50
paceline verify classification --control unsynced-batchnorm  # an error that the check must detect""",
    "compare": """\
paceline compare classification --preset quick --strategies single,ddp --devices 2
paceline compare runs/first runs/second  # a report on finished runs""",
    "plan": """\
paceline plan classification --preset quick --devices 2 --accelerator cpu
paceline plan classification --devices 16 --nodes 2 --bandwidth 25GB/s
paceline plan classification --preset quick --memory --device-memory 24GiB""",
    "pack": """\
paceline pack photos packed  # then train with --data packed --data-root packed
paceline pack cifar10 packed
paceline pack photos shards --to-shards  # tar files, for --data shards""",
    "doctor": """\
paceline doctor
paceline doctor --self-test
paceline doctor --loaders --data folder --data-root photos""",
    "board": """\
paceline board
paceline board s3://bucket/runs --port 8000""",
    "settings": """\
paceline settings  # all recipes and sources
paceline settings classification --preset quick""",
    "new": """\
paceline new recipe my_recipe
paceline new gan my_gan
paceline new source my_source""",
    "sample": """\
paceline sample runs/gan --grid 4x8
paceline sample runs/gan --interpolate --out interpolation.png
paceline sample runs/gan --animate""",
    "apply": """\
paceline apply runs/sr photos --out results
paceline apply weights.safetensors image.png --out results --tile 512""",
    "predict": """\
paceline predict runs/first image.png
paceline predict runs/first photos --top 1 --out predictions.csv""",
    "measure": """\
paceline measure results targets
paceline measure results targets --protocol y --border 4 --json metrics.json""",
    "import": """\
paceline import generator.pth --recipe super_resolution --out generator.safetensors""",
    "export": """\
paceline export runs/first --out model.onnx""",
    "launch slurm": """\
paceline launch slurm classification --data cifar10 --nodes 2 --gpus-per-node 4 --time 2:00:00
paceline launch slurm classification --data cifar10 --gpus-per-node 4 --submit""",
    "launch kubernetes": """\
paceline launch kubernetes classification --image example/paceline --gpus-per-node 4 --runs-claim runs""",
    "launch torchrun": """\
paceline launch torchrun classification --data cifar10 --hosts node1,node2 --devices 4""",
}
