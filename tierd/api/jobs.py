"""/v1/jobs: long work of the daemon, begun, watched and cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, RootModel

from tierd.api import schemas
from tierd.api.access import CALLER
from tierd.api.common import EDITS, JUDGES, moment
from tierd.api.parse import WHOLE, Body, Flag, Query
from tierd.api.routing import Call, Routes
from tierd.api.streams import stream
from tierd.daemon import work
from tierd.daemon.jobs import FINISHED, Job, JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiohttp import web

    from tierd.api.streams import Item
    from tierd.daemon.jobs import Work
    from tierd.daemon.service import Daemon

WATCH_S = 0.2

routes = Routes("jobs", "Long work: staging, verification, deletion, probes of devices.")

Path = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=400, pattern=r"^[ -~]+$")]


class StageRequest(Body):
    """Copy a checkpoint's tables to a device."""

    kind: Literal["stage"]
    checkpoint: Path = Field(description="Its directory, as the daemon sees it.")
    devices: list[Name] = Field(
        default=[], max_length=8, description="Path or UUID each; empty: all of the daemon's."
    )
    model: Name | None = Field(
        None, description="Name of the images' model; null: the directory's."
    )
    tables: list[Name] = Field(default=[], max_length=256, description="Only these; empty: all.")
    tensors: list[Name] = Field(
        default=[], max_length=256, description="Tensors that are tables although no rule says so."
    )

    @property
    def subject(self) -> str:
        """What it is about."""
        return self.checkpoint


class VerifyRequest(Body):
    """Check images."""

    kind: Literal["verify"]
    images: list[Name] = Field(default=[], max_length=256, description="MODEL/TABLE; empty: all.")
    full: bool = Field(False, description="Every page, every tag, and the digest of all rows.")
    checkpoint: Path | None = Field(None, description="Compare sampled rows with this one's.")
    sample: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = Field(
        200, description="Rows of each image."
    )

    @property
    def subject(self) -> str:
        """What it is about."""
        return ", ".join(self.images) or "all images"


class ProbeRequest(Body):
    """Measure a device's read time at queue depths 1 and 64."""

    kind: Literal["probe"]
    device: Name = Field(description="Path or UUID.")
    seconds: float = Field(1.0, ge=0.05, le=30.0, description="For each queue depth.")

    @property
    def subject(self) -> str:
        """What it is about."""
        return self.device


class JobRequest(
    RootModel[Annotated[StageRequest | VerifyRequest | ProbeRequest, Field(discriminator="kind")]]
):
    """Work to begin."""


class ChangeQuery(Query):
    """How to change."""

    dry_run: Flag = Field(False, description="Judge the request, and change nothing.")


@routes.get("/v1/jobs", schemas.Jobs)
async def get_jobs(call: Call) -> schemas.Jobs:
    """The jobs that are remembered, newest first."""
    return schemas.Jobs(jobs=[job_answer(job) for job in call.daemon.jobs.list()])


@routes.add("POST", "/v1/jobs", schemas.Job, query=ChangeQuery, body=JobRequest, status=202)
async def post_job(call: Call) -> schemas.Job | schemas.DryRun:
    """Begin a job. What cannot be done is refused at once; `Location` says where to watch it."""
    asked = call.body.root
    # Reads headers of checkpoints. Their file system may never answer: then only those wait who ask
    # for more jobs, neither other edits nor what else needs a thread.
    changes, todo = await asyncio.get_running_loop().run_in_executor(
        call.request.app[JUDGES], _judge, call.daemon, asked
    )
    if call.query.dry_run:
        return schemas.DryRun(changes=changes)
    async with call.request.app[EDITS]:
        job = Job(asked.kind, asked.subject, asked.model_dump(), call.request[CALLER].name)
        return job_answer(call.daemon.jobs.submit(job, todo))


@routes.get("/v1/jobs/{job:[^/]+}", schemas.Job, stream=schemas.Job)
async def get_job(call: Call) -> schemas.Job | web.StreamResponse:
    """One job.

    With `Accept: text/event-stream`, the job again at every change, until it has ended.
    """
    job = call.daemon.jobs.get(call.part("job"))
    if call.wants_stream:
        return await stream(call.request, _watch(job))
    return job_answer(job)


@routes.add("POST", "/v1/jobs/{job:[^/]+}/cancel", schemas.Job, query=ChangeQuery, status=202)
async def cancel_job(call: Call) -> schemas.Job | schemas.DryRun:
    """Cancel a job. It stops at its next block and leaves nothing half done."""
    job = call.daemon.jobs.get(call.part("job"))
    if call.query.dry_run:
        ended = job.state in FINISHED
        return schemas.DryRun(changes=[] if ended else [f"job {job.job_id}: cancelled"])
    return job_answer(call.daemon.jobs.cancel(job.job_id))


def _judge(
    daemon: Daemon, asked: StageRequest | VerifyRequest | ProbeRequest
) -> tuple[list[str], Work]:
    plane = daemon.plane
    match asked:
        case StageRequest():
            staging = work.Staging.judge(
                plane,
                checkpoint=asked.checkpoint,
                devices=asked.devices,
                model=asked.model,
                wanted=asked.tables,
                tensors=asked.tensors,
            )
            changes = [
                f"{table.name}: {'replaced' if table.replaces else 'staged'}, "
                f"{table.size_bytes} bytes on {staging.stores.path}"
                for table in staging.tables
                if not table.present
            ]
            return changes, staging.work(daemon.catalog)
        case VerifyRequest():
            return [], work.verify(
                plane,
                images=asked.images,
                full=asked.full,
                checkpoint=asked.checkpoint,
                sample=asked.sample,
            )
        case ProbeRequest():
            return [], work.probe(plane, asked.device, seconds=asked.seconds)


async def _watch(job: Job) -> AsyncGenerator[Item, None]:
    seen = -1
    while True:
        # Progress comes from a worker thread, far more often than anybody wants to see it.
        if job.version != seen:
            seen, ended = job.version, job.state in FINISHED
            yield "job", None, job_answer(job).model_dump_json()
            if ended:
                return
        await asyncio.sleep(WATCH_S)


def job_answer(job: Job) -> schemas.Job:
    """Return what REST says of a job."""
    state: Any = job.state.value
    running = job.state is JobState.RUNNING
    return schemas.Job(
        job=job.job_id,
        kind=job.kind,
        subject=job.subject,
        state=state,
        caller=job.caller,
        request=job.request,
        created_at=moment(job.created),
        started_at=None if job.started is None else moment(job.started),
        finished_at=None if job.finished is None else moment(job.finished),
        progress=schemas.Progress(
            done_bytes=job.done,
            total_bytes=job.total,
            bytes_per_s=job.rate,
            left_s=job.left_s,
            doing=job.doing if running else "",
        ),
        result=job.result,
        error=job.error,
    )
