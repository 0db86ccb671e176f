"""What commands in the tests share, so that each one starts quickly: modules, the parser and Pillow's file formats."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import typer.main
from PIL import Image

from paceline.cli.app import app

MODULES = [  # imported before forking
    "paceline.cli.app",
    "paceline.commands.apply",
    "paceline.commands.compare",
    "paceline.commands.train",
    "paceline.commands.evaluate",
    "paceline.commands.measure",
    "paceline.commands.sample",
    "paceline.recipes.classification",
    "paceline.recipes.dcgan",
    "paceline.recipes.super_resolution",
    "paceline.data.loaders.dali",
    "paceline.data.loaders.resident",
    "paceline.data.loaders.workers",
    "paceline.data.sources.digits",
    "paceline.data.sources.folder",
    "paceline.evaluation.evaluators.accuracy",
    "paceline.evaluation.evaluators.generation",
    "paceline.evaluation.evaluators.restoration",
    "paceline.launch.tasks",
    "paceline.launch.worker",
    "lightning.pytorch",
    "paceline.parallel.strategies.ddp",
    "paceline.parallel.strategies.lightning",
    "paceline.parallel.strategies.single",
    "paceline.runs.loggers.tensorboard",
    "preloaded",
    "torch._inductor",  # DistributedDataParallel imports this module
    "torch.utils.tensorboard",
]

if find_spec("typer._adapters"):  # only some versions have this module, which a command would import
    import_module("typer._adapters")
typer.main.get_command = cache(typer.main.get_command)  # otherwise built again by each command of a process
typer.main.get_command(app)
Image.init()
