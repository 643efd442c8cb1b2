"""`penstock pack`: writes the weights of a model as the native backend packs them, so that later starts only map a file."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import click

from penstock.cli.files import check_folder
from penstock.cli.options import (
    EPILOG,
    GroupedCommand,
    config_file_option,
    model_argument,
    setting_option,
    warn_of_unknown_variables,
)
from penstock.config import Backend, Device
from penstock.config.components import config_from
from penstock.config.units import format_size
from penstock.types.errors import ConfigError, ModelError, PenstockError


@click.command(cls=GroupedCommand, epilog=EPILOG)
@model_argument
@click.option("--check", "is_check", is_flag=True, help="Write nothing: read the whole file and compare checksums.")
@setting_option("cache")
@setting_option("merge_lora")
@setting_option("weight_dtype")
@setting_option("task")
@setting_option("experts_on_disk")
@config_file_option
def pack(is_check: bool, **values: Any) -> None:
    """Convert the weights of MODEL once, into a file that later starts on the CPU map.

    \b
      penstock pack qwen2.5-coder:1.5b
      penstock pack qwen2.5-coder:1.5b --check

    Starts use it as long as the model's files, the settings below and Penstock's version are the same; otherwise they convert
    the weights and say so. The file is as large as the weights in memory. It can be deleted at any time.
    """
    from penstock.backends.native.executor import NativeExecutor
    from penstock.deploy.factory import locate, open_executor
    from penstock.deploy.resolve import packed_weights
    from penstock.models.packed_file import PackedError, check_owner, write_packed

    warn_of_unknown_variables()
    config = config_from({**values, "device": Device.CPU.value, "backend": Backend.NATIVE.value})
    if config.model.experts_on_disk:
        raise ConfigError(
            "experts_on_disk is set, and a start with it does not use packed weights: it keeps experts in a file of its own.",
            remedy="Leave it out to pack all weights, for starts without it.",
        )
    source = locate(config)
    packed = packed_weights(config, source.path)
    identity = packed.identity()  # before the files are read: a change meanwhile makes another identity
    with suppress(OSError):  # `write_packed` makes the folder
        check_owner(packed.folder, packed.folder.stat())
    try:
        with packed.open(is_checked=True) as file:
            print(f"{file.path}: {format_size(file.num_bytes)}: checksums are right")
        return
    except FileNotFoundError:
        if is_check:
            message = f"There are no packed weights of {source.name} in {packed.folder}."
            raise ModelError(message, remedy="Write them with `penstock pack`.") from None
    except PackedError as error:
        if is_check:
            raise
        print(f"The weights are converted again: {error.message}", file=sys.stderr)
    check_folder(packed.folder, remedy="Name another cache with --cache or PENSTOCK_CACHE.")
    _, _, executor = open_executor(config, source, uses_packed=False)
    assert isinstance(executor, NativeExecutor)
    try:
        write_packed(
            packed.path, identity, executor.packed, on_wait=lambda: print("Another process packs them; waiting for it.")
        )
    except OSError as error:
        raise PenstockError(
            f"The packed weights can't be written to {packed.folder}: {error.strerror or error}.",
            remedy=f"They take {format_size(executor.weight_bytes)}. Free some of the disk, or name a folder with --cache.",
        ) from error
    finally:
        executor.close()
    with packed.open(is_checked=True) as file:
        print(f"{file.path}: {format_size(file.num_bytes)}")
