"""Settings from the projects that the recipes follow, and what to use instead; see also `config.other_names`."""

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
    "which_direction": "use --set panels=target,image for BtoA, and panels=image,target for AtoB",
    "load_size": _SIZE,
    "loadSize": _SIZE,
    "preprocess": _SIZE,
    "netG": _GENERATOR,
    "net_g": _GENERATOR,
    "which_model_netG": _GENERATOR,
    "netD": _LAYERS,
    "n_layers_D": _LAYERS,
    "niter": _EPOCHS,
    "niter_decay": _EPOCHS,
    "n_epochs": _EPOCHS,
    "n_epochs_decay": _EPOCHS,
    "lambda_L1": "use --set distance_weight=100",
    "lambda_A": "use --set distance_weight=100; CycleGAN is not included",
    "lambda_identity": "leave it out: CycleGAN is not included",
    "pool_size": "leave it out: the discriminators always see the newest images",
    "init_type": "leave it out: weights start from a normal distribution with standard deviation 0.02, as in pix2pix",
    "init_gain": "leave it out: weights start from a normal distribution with standard deviation 0.02, as in pix2pix",
    "dataset_mode": "leave it out: rows of panels and folders A and B are recognised",
    "serial_batches": "leave it out: the order depends only on --seed",
    "upsample": "leave it out: the generators use transposed convolutions",
    "remote": "leave it out: `paceline board` shows the run",
    "remote_transfer_cmd": "use --mirror URL",
    "epoch_count": "leave it out: the same command resumes the run",
    "gan_mode": "use --set gan=vanilla or lsgan",
    "lr_policy": "use --set schedule=linear",
    "no_dropout": "use --set dropout=0",
    "no_flip": "use --set flip=off",
    "input_nc": "use --set channels=N",
    "output_nc": "use --set channels=N",
    "modalities_no": "use --set modalities=N",
    "modalities_names": "use --set panels=image,dapi,segmentation",
    "targets_no": "use --set modalities=N",
    "seg_gen": "list the panels with or without segmentation, e.g. --set panels=image,dapi,segmentation",
    "seg_weights": "use --set segmentation_weights=0.5,0.5",
    "loss_G_weights": "use --set generator_weights=0.5,0.5",
    "loss_D_weights": "use --set discriminator_weights=0.5,0.5",
}
SUPER_RESOLUTION = {
    **dict.fromkeys(("upscale_factor", "scale_factor", "scaling_factor", "upscale"), "use --set scale=4"),
    "dp": "use --strategy dp",
    "device": "use --devices N, or --accelerator cuda",
    **dict.fromkeys(("num_feat", "n_feats", "n_channels"), "use --set width=64"),
    **dict.fromkeys(("num_block", "n_blocks", "n_resblocks"), "use --set num_blocks=16"),
    **dict.fromkeys(("gt_size", "hr_size"), _CROP),
    "patch_size": "use --crop PIXELS, the size of the high-resolution crop",
    "lr_size": "use --crop PIXELS, the size of the high-resolution crop",
    "beta": "use --set adversarial=1e-3",
    "downsample": "use `paceline apply --downsample bicubic`",
    "image": "use `paceline apply RUN IMAGES --out DIR`",
}
GENERATIVE = {
    **dict.fromkeys(("latent_dim", "z_dim", "noise_dim", "latent_size"), "use --set nz=100"),
    **dict.fromkeys(("netG", "netD"), "use --init-from FILE to start from trained networks"),
    "lambda_gp": "use --set r1=WEIGHT, the gradient penalty on real images",
    "n_critic": "leave it out: each step updates every network once",
}
CLASSIFICATION = {
    **dict.fromkeys(
        ("arch", "model", "backbone", "model_name", "net"), "use --set depth=18, 34 or 50, or --set network=timm:NAME"
    ),
    **dict.fromkeys(("drop_path", "drop_path_rate"), "use --set network_args.drop_path_rate=0.1"),
    "drop": "use --set dropout=0.1, or --set network_args.drop_rate=0.1 for networks from timm",
    "smoothing": "use --set label_smoothing=0.1",
    "model_ema": "use --set 'ema_half_life=1 epochs'",
    "aa": "use --set trivial_augment=true",
    **dict.fromkeys(("mixup_alpha", "mixup_prob"), "use --set mixup=0.8 and --set mix_probability=1"),
    **dict.fromkeys(("cutmix_alpha", "cutmix_prob"), "use --set cutmix=1 and --set mix_probability=1"),
}
