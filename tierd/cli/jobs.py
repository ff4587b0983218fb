"""Jobs of a running daemon: commands on them, and how other commands become jobs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierd.cli.base import api_option, api_path, cli, config_option, json_option, print_json
from tierd.cli.groups import Group
from tierd.errors import ConfigError, DaemonError, JobFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENDED = {"done", "failed", "cancelled"}


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    """A daemon that has the devices in question.

    Attributes:
        path: its REST socket.
        devices: their UUIDs.
    """

    path: Path
    devices: list[str]


def daemon_of(
    devices: Sequence[str], api_socket: str | None, config_path: Path | None
) -> Serving | None:
    """Find the daemon that serves ``devices`` (all of its own if none is named).

    None if none does. A daemon that was named has to be there; one that was not may be
    unreachable, and then the device itself will say whether somebody holds it.
    """
    from tierd.api import rest_client

    try:
        path = api_path(api_socket, config_path)
        served = rest_client.get(path, "/v1/devices")["devices"]
    except (ConfigError, DaemonError):
        if api_socket:
            raise
        return None
    if not devices:
        return Serving(path, [each["uuid"] for each in served])
    found = [each["uuid"] for name in devices for each in served if _is_same(name, each)]
    return Serving(path, found) if len(found) == len(devices) else None


def _is_same(name: str, device: dict[str, Any]) -> bool:
    if name.startswith("UUID="):
        return name == f"UUID={device['uuid']}"
    try:
        return os.path.samefile(name, device["path"])
    except OSError:
        return False


def run(path: Path, request: dict[str, Any], *, title: str, quiet: bool) -> dict[str, Any]:
    """Have the daemon do a job, show its progress, and return its result.

    Ctrl-C cancels the job.

    Raises:
        JobFailedError: it failed or was cancelled; the text is the daemon's.
    """
    from tierd.api import rest_client

    return _watch(path, rest_client.change(path, "POST", "/v1/jobs", request), title, quiet)


def delete_image(path: Path, name: str, *, wipe: bool, quiet: bool) -> dict[str, Any]:
    """Have the daemon delete an image; raises as :func:`run` does."""
    from tierd.api import rest_client

    resource = f"/v1/images/{name}?wipe={'true' if wipe else 'false'}"
    return _watch(path, rest_client.change(path, "DELETE", resource), "deleting", quiet)


def _watch(path: Path, begun: dict[str, Any], title: str, quiet: bool) -> dict[str, Any]:
    from tierd.api import rest_client
    from tierd.tools import progress

    job = begun
    resource = f"/v1/jobs/{job['job']}"
    try:
        with progress.bar(title, quiet=quiet) as report:
            for job in rest_client.follow(path, resource):
                now = job["progress"]
                if report is not None:
                    report(now["done_bytes"], now["total_bytes"])
    except KeyboardInterrupt:
        rest_client.change(path, "POST", f"{resource}/cancel")
        raise JobFailedError(f"job {job['job']} was cancelled") from None
    if job["state"] not in _ENDED:
        raise JobFailedError(f"the daemon stopped before job {job['job']} ended; run: tierd status")
    if job["state"] != "done":
        raise JobFailedError(job["error"])
    result: dict[str, Any] = job["result"]
    return result


@cli.group(cls=Group)
def jobs() -> None:
    """List, show and cancel the daemon's jobs."""


@jobs.command("list")
@api_option
@config_option
@json_option
def list_jobs(api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """List the jobs that the daemon remembers, newest first."""
    from tierd.api import rest_client

    answer = rest_client.get(api_path(api_socket, config_path), "/v1/jobs")
    if as_json:
        print_json(answer)
        return
    from tierd.tools import show

    show.jobs(answer["jobs"])


@jobs.command("show")
@click.argument("job")
@api_option
@config_option
@json_option
def show_job(job: str, api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Show one job: how far it is, what it found."""
    from tierd.api import rest_client

    answer = rest_client.get(api_path(api_socket, config_path), f"/v1/jobs/{job}")
    if as_json:
        print_json(answer)
        return
    from tierd.tools import show

    show.job(answer)


@jobs.command("cancel")
@click.argument("job")
@api_option
@config_option
@json_option
def cancel_job(job: str, api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Cancel a job; it stops at its next block and leaves nothing half done."""
    from tierd.api import rest_client

    path = api_path(api_socket, config_path)
    answer = rest_client.change(path, "POST", f"/v1/jobs/{job}/cancel")
    if as_json:
        print_json(answer)
        return
    click.echo(f"job {answer['job']}: {answer['state']}, will end")
