"""/v1/images and /v1/tables: what is staged, and how it is served."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pydantic import Field

from tierd.api import schemas, tiers
from tierd.api.access import CALLER
from tierd.api.common import EDITS, moment
from tierd.api.jobs import job_answer
from tierd.api.parse import Flag, Query
from tierd.api.routing import Call, Routes
from tierd.daemon import work
from tierd.daemon.jobs import Job
from tierd.daemon.recent import ring_sums

if TYPE_CHECKING:
    from tierd.daemon.plane import DataPlane
    from tierd.daemon.served import ServedImage

PAGE_BYTES = 4096

# A model's name may have slashes in it, a table's may not.
IMAGE = "/v1/images/{model:.+}/{table:[^/]+}"
TABLE = "/v1/tables/{model:.+}/{table:[^/]+}"

routes = Routes("images", "Staged tables, and how they are served.")


class ImagesQuery(Query):
    """Which images."""

    model: str | None = Field(None, max_length=300, description="Of this model only.")


class DeleteQuery(Query):
    """How to delete."""

    wipe: Flag = Field(False, description="Overwrite its pages with zeroes and read them back.")
    dry_run: Flag = Field(False, description="Say what would change, and change nothing.")


@routes.get("/v1/images", schemas.Images, query=ImagesQuery)
async def get_images(call: Call) -> schemas.Images:
    """Every image that is served."""
    model = call.query.model
    served = call.daemon.plane.images.values()
    chosen = [image for image in served if model is None or image.info.model == model]
    return schemas.Images(images=[_image(image) for image in chosen])


@routes.get(IMAGE, schemas.Image, tagged=True)
async def get_image(call: Call) -> schemas.Image:
    """One image."""
    return _image(_named(call))


@routes.add("DELETE", IMAGE, schemas.Job, query=DeleteQuery, status=202, tagged=True)
async def delete_image(call: Call) -> schemas.Job | schemas.DryRun:
    """Delete an image that nobody has attached, or finish its wipe; a job does it."""
    query: DeleteQuery = call.query
    plane, catalog = call.daemon.plane, call.daemon.catalog
    name = f"{call.part('model')}/{call.part('table')}"
    async with call.request.app[EDITS]:
        if plane.owes_wipe(name):
            if query.dry_run:
                end = "its wipe is finished" if query.wipe else "its room is free, not wiped"
                return schemas.DryRun(changes=[f"{name}: {end}"])
            todo = work.finish_wipe(plane, catalog, name, wipe=query.wipe)
            asked = {"image": name, "wipe": query.wipe}
            return job_answer(
                call.daemon.jobs.submit(Job("delete", name, asked, call.request[CALLER].name), todo)
            )
        image = _named(call)
        call.require_match(_image(image))
        todo = work.delete(plane, catalog, image.info.name, wipe=query.wipe)
        if query.dry_run:
            size = image.info.pages * PAGE_BYTES
            text = f"{image.info.name}: deleted, {size} bytes free"
            return schemas.DryRun(changes=[text])
        asked = {"image": image.info.name, "wipe": query.wipe}
        job = Job("delete", image.info.name, asked, call.request[CALLER].name)
        return job_answer(call.daemon.jobs.submit(job, todo))


@routes.get("/v1/tables", schemas.Tables)
async def get_tables(call: Call) -> schemas.Tables:
    """Every table: its window, and the counters of its reads."""
    images = call.daemon.plane.images.values()
    sums = ring_sums(call.daemon.attach)
    return schemas.Tables(tables=[_table(call.daemon.plane, image, sums) for image in images])


@routes.get(TABLE, schemas.Table)
async def get_table(call: Call) -> schemas.Table:
    """One table."""
    return _table(call.daemon.plane, _named(call), ring_sums(call.daemon.attach))


def _named(call: Call) -> ServedImage:
    return call.daemon.plane.named(f"{call.part('model')}/{call.part('table')}")


def _table(plane: DataPlane, image: ServedImage, sums: dict[str, Counter[str]]) -> schemas.Table:
    info, counts = image.info, sums.get(image.info.name, Counter())
    names = ("lookups", "hits", "misses", "steps", "late_steps", "stall_ns", "failed", "tag_errors")
    return schemas.Table(
        name=info.name,
        image_id=f"{info.image_id:016x}",
        generation=info.generation,
        layer=info.table.layer,
        group=info.table.group,
        rows=info.table.rows,
        row_bytes=info.table.row_bytes,
        tier=tiers.first(image, plane),
        devices=[store.device.path for store in image.striped.stores],
        window_us=image.window_ns / 1000,
        window_source="assumed" if image.window_us is None else "placement",
        clients=image.clients,
        hit_ratio=counts["hits"] / counts["lookups"] if counts["lookups"] else None,
        late_ratio=counts["late_steps"] / counts["steps"] if counts["steps"] else None,
        **{name: counts[name] for name in names},
    )


def _image(image: ServedImage) -> schemas.Image:
    info, table = image.info, image.info.table
    return schemas.Image(
        name=info.name,
        model=info.model,
        table=table.name,
        image_id=f"{info.image_id:016x}",
        generation=info.generation,
        kind=table.kind.value,
        layer=table.layer,
        group=table.group,
        rows=table.rows,
        dim=table.dim,
        row_bytes=table.row_bytes,
        row_format=table.row_format.value,
        pages=info.pages,
        size_bytes=info.pages * PAGE_BYTES,
        fingerprint=info.fingerprint,
        digest=info.digest,
        digest_kind=info.digest_kind,
        tensors=list(table.tensors),
        staged_at=moment(info.staged_at),
        device=image.place,
        device_uuid=image.store.uuid if image.local else "",
        extents=image.extents,
        page_version=info.page_version,
        fault="",
        devices=[store.device.path for store in image.striped.stores],
        copies=[[store.device.path for store in copy.stores] for copy in image.copies],
        clients=image.clients,
    )
