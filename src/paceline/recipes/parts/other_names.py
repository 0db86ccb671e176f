"""Settings from pix2pix, DeepLIIF and the distributed SRGAN project, and what to use instead."""

from __future__ import annotations

_CROP = "use --crop PIXELS"
_SIZE = "use --set size=PIXELS to scale the images, and --crop PIXELS to train on crops"
_EPOCHS = (
    "use --epochs N for the total number of epochs; --set hold=50% keeps the learning rate constant for the first half"
)
_GENERATOR = "use --set generator=unet_256, unet_128, resnet_9 or resnet_6"
_LAYERS = "use --set d_layers=N"

TRANSLATION = {
    "direction": "use --set panels=target,image for BtoA, and panels=image,target for AtoB",
    "input_panel": "use --set panels=target,image to take the second panel as the input",
    "dataroot": "use --data-root DIR",
    "load_size": _SIZE,
    "loadSize": _SIZE,
    "crop_size": _CROP,
    "fineSize": _CROP,
    "preprocess": _SIZE,
    "netG": _GENERATOR,
    "net_g": _GENERATOR,
    "netD": _LAYERS,
    "n_layers_D": _LAYERS,
    "niter": _EPOCHS,
    "niter_decay": _EPOCHS,
    "n_epochs": _EPOCHS,
    "n_epochs_decay": _EPOCHS,
    "lambda_L1": "use --set distance_weight=100",
    "gan_mode": "use --set gan=vanilla or lsgan",
    "lr_policy": "use --set schedule=linear",
    "no_dropout": "use --set dropout=0",
    "no_flip": "use --set flip=off",
    "input_nc": "use --set channels=N",
    "output_nc": "use --set channels=N",
    "batchSize": "use --batch-size N",
    "gpu_ids": "use --gpus 0,1, or --devices N",
    "checkpoints_dir": "use --out DIR",
    "continue_train": "leave it out: the same command resumes the run",
    "save_epoch_freq": "use --set save_every=5%",
    "modalities_no": "use --set modalities=N",
    "seg_gen": "list the panels with or without segmentation, e.g. --set panels=image,dapi,segmentation",
    "seg_weights": "use --set segmentation_weights=0.5,0.5",
    "loss_G_weights": "use --set generator_weights=0.5,0.5",
    "loss_D_weights": "use --set discriminator_weights=0.5,0.5",
}
SUPER_RESOLUTION = {
    "upscale_factor": "use --set scale=4",
    "crop_size": _CROP,
    "num_epochs": "use --epochs N",
    "n_epochs": "use --epochs N",
    "pretrain": "convert the file with `paceline import`, then use --init-from FILE",
    "pretrained": "convert the file with `paceline import`, then use --init-from FILE",
    "batchSize": "use --batch-size N",
    "dp": "use --strategy dp",
    "cuda": "use --accelerator cuda",
    "num_feat": "use --set width=64",
    "num_block": "use --set num_blocks=16",
    "gt_size": _CROP,
    "gpu_ids": "use --gpus 0,1, or --devices N",
}
