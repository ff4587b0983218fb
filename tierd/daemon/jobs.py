"""Long work of the daemon: queued, run one at a time, watched, cancelled.

A job is a plain function that runs in a worker thread, reports its progress and stops at the
report that finds it cancelled. One runs at a time, because two would only share one disk's
bandwidth; they run with the least priority for CPU and disk, so that serving comes first. The
board keeps the last JOBS_MAX jobs; what they did is in the history as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import queue
import threading
import time
import uuid
from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import structlog

from tierd.errors import JobCancelledError, JobError, NoJobError, TierdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.catalog import Catalog

    Work = Callable[["Job"], dict[str, Any]]

log = structlog.get_logger("tierd.daemon.jobs")

JOBS_MAX = 200
QUEUED_MAX = 32
STOP_S = 5.0
_NICE = 10
_IOPRIO_SET = 251 if os.uname().machine == "x86_64" else 30
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINISHED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


@dataclasses.dataclass(eq=False)
class Job:
    """One piece of work.

    Attributes:
        kind: stage, verify, delete, probe...
        subject: the image, device or checkpoint that it is about.
        request: what was asked for, JSON-ready.
        caller: who asked.
        done: of ``total`` bytes; total is None until it is known.
        doing: what it does now, for people.
        result: what it found or made; None unless it is done.
        error: the one line why it failed; "" otherwise.
        version: raised by every change, so that watchers see whether there was one.
    """

    kind: str
    subject: str
    request: dict[str, Any]
    caller: str
    job_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])
    state: JobState = JobState.QUEUED
    created: float = dataclasses.field(default_factory=time.time)
    started: float | None = None
    finished: float | None = None
    done: int = 0
    total: int | None = None
    doing: str = ""
    result: dict[str, Any] | None = None
    error: str = ""
    version: int = 0
    _stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def report(self, done: int, total: int) -> None:
        """Take note of progress in bytes; a cancelled job ends here.

        Raises:
            JobCancelledError: the job was cancelled.
        """
        self.done, self.total = done, total
        self.version += 1
        self.check()

    def check(self) -> None:
        """End here if the job was cancelled.

        Raises:
            JobCancelledError: it was.
        """
        if self._stop.is_set():
            raise JobCancelledError(f"job {self.job_id} was cancelled")

    def stop(self) -> None:
        """Have it end at its next report."""
        self._stop.set()

    def say(self, doing: str) -> None:
        """Tell what it does now; progress starts anew."""
        self.doing, self.done, self.total = doing, 0, None
        self.version += 1
        self.check()

    @property
    def rate(self) -> float | None:
        """Bytes a second since it started; None before there is something to tell."""
        if self.started is None or not self.done:
            return None
        seconds = (self.finished or time.time()) - self.started
        return self.done / seconds if seconds > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds until it is done, at the rate so far; None while unknown."""
        rate = self.rate
        if self.state is not JobState.RUNNING or rate is None or self.total is None:
            return None
        return max(0.0, (self.total - self.done) / rate)


class Board:
    """The jobs of one daemon.

    Attributes:
        stuck: a job did not end when it was closed, since a device does not answer it.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._todo: dict[str, Work] = {}
        self._closed = False
        self.stuck = False
        # A daemon thread, so that a device that hangs cannot hold the process's end up.
        self._thread = threading.Thread(target=self._work, name="tierd-job", daemon=True)
        self._thread.start()

    def submit(self, job: Job, work: Work) -> Job:
        """Queue a job.

        Raises:
            JobError: too many are queued, or the daemon stops.
        """
        with self._lock:
            waiting = sum(each.state is JobState.QUEUED for each in self._jobs.values())
            if waiting >= QUEUED_MAX or self._closed:
                raise JobError(
                    f"{waiting} jobs wait already; cancel some or try again later; "
                    "run: tierd jobs list"
                )
            self._jobs[job.job_id] = job
            self._todo[job.job_id] = work
            while len(self._jobs) > JOBS_MAX:
                oldest = next(each for each in self._jobs.values() if each.state in FINISHED)
                del self._jobs[oldest.job_id]
        self._queue.put(job)
        return job

    def list(self) -> list[Job]:
        """Return all jobs that are remembered, newest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))

    def get(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            NoJobError: there is none of this id.
        """
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            raise NoJobError(f"there is no job {job_id[:40]!r}; run: tierd jobs list")
        return job

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop; it does at its next report, and leaves nothing half done.

        Raises:
            NoJobError: there is none of this id.
        """
        job = self.get(job_id)
        job.stop()
        with self._lock:
            if job.state is JobState.QUEUED:
                del self._todo[job_id]
                self._finish(job, JobState.CANCELLED, f"job {job_id} was cancelled")
        return job

    def close(self, timeout_s: float = STOP_S) -> None:
        """Cancel everything and wait until nothing runs, for ``timeout_s`` at most. Idempotent."""
        with self._lock:
            self._closed = True
        for job in self.list():
            if job.state not in FINISHED:
                self.cancel(job.job_id)
        self._queue.put(None)
        self._thread.join(timeout_s)
        self.stuck = self._thread.is_alive()

    def _work(self) -> None:
        _yield_to_serving()
        while (job := self._queue.get()) is not None:
            self._run(job)

    def _run(self, job: Job) -> None:
        with self._lock:
            # Taken out: an ended job's work would keep the checkpoint open that it has read.
            work = self._todo.pop(job.job_id, None)
            if work is None:
                return
            job.state, job.started = JobState.RUNNING, time.time()
            job.version += 1
        log.info("job started", job=job.job_id, kind=job.kind, subject=job.subject, by=job.caller)
        try:
            job.result = work(job)
        except JobCancelledError as error:
            self._finish(job, JobState.CANCELLED, str(error))
        except TierdError as error:
            self._finish(job, JobState.FAILED, str(error))
        except Exception:
            # The worker must outlive it; the traceback is in the log, for whoever mends it.
            log.exception("job failed by a fault of ours", job=job.job_id, kind=job.kind)
            text = "a fault of the daemon; run: journalctl -u tierd -n 50"
            self._finish(job, JobState.FAILED, text)
        else:
            self._finish(job, JobState.DONE, "")

    def _finish(self, job: Job, state: JobState, error: str) -> None:
        job.error, job.finished = error, time.time()
        job.state = state
        job.version += 1
        seconds = round(job.finished - (job.started or job.finished), 3)
        write = log.warning if state is JobState.FAILED else log.info
        write("job ended", job=job.job_id, kind=job.kind, state=state.value, error=error)
        self._catalog.record(
            "job",
            job.job_id,
            job=job.kind,
            about=job.subject,
            state=state.value,
            error=error,
            seconds=seconds,
            by=job.caller,
        )


def _yield_to_serving() -> None:
    """Give this thread, and those it starts, the least priority for CPU and disk."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_IOPRIO_SET, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
