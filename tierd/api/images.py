"""GET /v1/images and /v1/images/{model}/{table}: what is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tierd.api import schemas
from tierd.api.common import DAEMON, moment, reply
from tierd.errors import ImageError

if TYPE_CHECKING:
    from tierd.daemon.plane import ServedImage

PAGE_BYTES = 4096

routes = web.RouteTableDef()


@routes.get("/v1/images")
async def get_images(request: web.Request) -> web.Response:
    """Answer with every image; ``?model=NAME`` with one model's."""
    model = request.query.get("model")
    served = request.app[DAEMON].plane.images.values()
    chosen = [image for image in served if model is None or image.info.model == model]
    return reply(schemas.Images(images=[_image(image) for image in chosen]))


# A model's name may have slashes in it, a table's may not.
@routes.get("/v1/images/{model:.+}/{table:[^/]+}")
async def get_image(request: web.Request) -> web.Response:
    """Answer with one image."""
    name = f"{request.match_info['model']}/{request.match_info['table']}"
    for image in request.app[DAEMON].plane.images.values():
        if image.info.name == name:
            return reply(_image(image))
    raise ImageError(f"there is no image {name} here; run: tierd images")


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
        device=image.store.device.path,
        device_uuid=image.store.uuid,
        extents=image.extents,
        page_version=info.page_version,
        fault="",
        devices=[store.device.path for store in image.striped.stores],
        clients=image.clients,
    )
