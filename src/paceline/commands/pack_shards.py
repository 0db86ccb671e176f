"""`paceline pack SRC DST --to-shards`: write a source into tar files in the WebDataset layout, with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.commands.pack import can_resume, describe_size, only_writer, open_origin, progress
from paceline.core.errors import UserError
from paceline.core.files import remove_leftovers, user_path, write_file
from paceline.core.printable import print_line
from paceline.core.types import SettingValues
from paceline.data.packing.manifest import UNFINISHED, Manifest, SplitRecord, load_manifest
from paceline.data.packing.origin import describe, difference
from paceline.data.packing.writer import begin
from paceline.data.shards.catalog import MANIFEST, encode_manifest, parse_manifest
from paceline.data.shards.writer import check_shard, write_shards
from paceline.data.source import Source

ORIGIN = "shards_origin.json"  # describes the source, to detect changes
MEGABYTE = 10**6


def pack_to_shards(
    origin: str,
    destination: str,
    flags: SettingValues,
    assignments: SettingValues,
    shard_mb: int,
    *,
    train_only: bool = False,
) -> int:
    """Write a source into shards; if the destination is already complete, check it instead."""
    if shard_mb < 1:
        raise UserError(f"--shard-mb {shard_mb}: must be at least 1")
    folder = user_path(destination)
    settings, sources = open_origin(origin, folder, flags, assignments, train_only=train_only)
    made_from = {"data": settings.data, "shard_mb": str(shard_mb)}
    made_from |= {name: str(value) for name, value in assignments.items()}
    splits = {split: describe(source) for split, source in sources.items()}
    if (folder / MANIFEST).is_file():
        return _check(folder, sources, splits)
    decoded = bool(settings.size or settings.channels)
    resumed = begin(folder, splits, made_from)
    names: dict[str, list[str]] = {}
    with can_resume(folder), only_writer(folder):
        for split, source in sources.items():
            with progress(f"{'resuming' if resumed else 'writing'}: {split}", len(source)) as shown:
                names[split] = list(write_shards(source, folder, split, shard_mb * MEGABYTE, decoded, shown))
        Manifest(made_from, splits).write(folder / ORIGIN)
        spec = sources["train"].spec
        write_file(folder / MANIFEST, encode_manifest(names, spec.class_names, spec.flip_allowed))
        (folder / UNFINISHED).unlink()
        remove_leftovers(folder)
    if any(source.groups for source in sources.values()):
        print_line("group_by: shards do not store groups, so validation samples are held out at random")
    counts = ", ".join(f"{len(source):,} {split}" for split, source in sources.items())
    num_shards = sum(map(len, names.values()))
    print_line(
        f"wrote {counts} samples into {num_shards:,} {'shard' if num_shards == 1 else 'shards'} in {folder} "
        f"({describe_size(folder)}); use them with --data shards --data-root {folder}"
    )
    return 0


def _check(folder: Path, sources: Mapping[str, Source], splits: Mapping[str, SplitRecord]) -> int:
    """Check that the shards are intact and were written from this source."""
    differs = difference(load_manifest(folder / ORIGIN, folder).splits, splits)
    if differs:
        raise UserError(
            f"{folder}: was written from a different source, or the source has changed since then ({differs}); "
            f"delete {folder} and pack again, or choose a different folder"
        )
    names = parse_manifest((folder / MANIFEST).read_bytes(), str(folder)).splits
    for split, source in sources.items():
        with progress(f"checking: {split}", len(source)) as shown:
            for name in names.get(split, ()):
                shown(check_shard(folder, name))
    print_line(f"{folder} is already complete; all checksums match")
    return 0
