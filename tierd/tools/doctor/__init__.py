"""``tierd doctor``: looks at the machine, and says what is wrong, why, and what cures it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierd.tools.doctor import devices, hardware, kernel, remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierd.config import Settings
    from tierd.tools.doctor.finding import Finding


def examine(
    settings: Settings, *, seconds: float | None = None, gpu: bool = False
) -> list[dict[str, Any]]:
    """Examine the machine.

    Args:
        settings: which devices, and how much memory clients may use.
        seconds: how long to read each device at each queue depth; None reads nothing, which is
            what a daemon does when it starts.
        gpu: register memory with CUDA, which takes a second or two where there is a GPU.

    Returns:
        Findings, JSON-ready, the worst first.
    """
    found = list(_look(settings, seconds, gpu=gpu))
    order = ("problem", "warning", "ok")
    found.sort(key=lambda finding: order.index(finding.severity))
    return [finding.to_json() for finding in found]


def _look(settings: Settings, seconds: float | None, *, gpu: bool) -> Iterator[Finding]:
    yield kernel.io_uring()
    yield kernel.memlock(settings)
    yield kernel.huge_pages()
    for path in settings.devices.paths:
        yield from devices.examine(path, seconds=seconds)
    yield hardware.numa(settings.devices.paths)
    yield from hardware.rdma()
    yield from remote.examine(settings, probe=seconds is not None)
    if gpu:
        yield hardware.cuda()
