"""Where a model's files lie on this machine."""

from __future__ import annotations

from pathlib import Path

from tierd.errors import HookError


def checkpoint_directory(name: str, revision: str | None, cache: str | None) -> Path:
    """Return the directory of a model that is named as engines name them.

    Args:
        name: a directory, or a model of the hub that was downloaded.
        revision: of the downloaded model; None is its main one.
        cache: where models are downloaded to; None is the hub's own place.

    Raises:
        HookError: the model is not on this machine.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - the engines bring it
    from huggingface_hub.errors import (  # noqa: PLC0415
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        raise HookError(
            f"{name} is neither a directory nor a downloaded model, so its tables cannot have been "
            "staged; download it, then run: tierd stage CHECKPOINT --device DEVICE"
        ) from None
    return Path(found)
