"""The routes: the page, a JSON API with an OpenAPI description, and thumbnails of the images."""

import contextlib
import hashlib
import pathlib
from typing import Annotated

import fastapi
import pydantic
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from xe_retrieval.preparation import image_files
from xe_retrieval.search.stores.store import Unavailable
from xe_retrieval.serving import middleware, operations, schema, thumbnails
from xe_retrieval.serving.batching import Busy
from xe_retrieval.serving.limits import LIMITS
from xe_retrieval.serving.loaded import InvalidRequest, UnknownImage
from xe_retrieval.serving.service import Service

_KINDS = {
  ".html": "text/html",
  ".css": "text/css",
  ".js": "text/javascript",
  ".svg": "image/svg+xml",
}
_PAGES = {"/": "page.html", "/api": "api.html"}  # the other files have their name as address
_FOLDER = pathlib.Path(__file__).parent / "page"
_WRONG = {422: {"model": schema.Error, "description": "The request is invalid; `detail` says why."}}
_FULL = {
  429: {"model": schema.Error, "description": "Too many requests are waiting; try again."},
  503: {"model": schema.Error, "description": "The engine that holds the vectors does not answer."},
}
_UNKNOWN = {404: {"model": schema.Error, "description": "No image has this id."}}
_BODY = {
  400: {"model": schema.Error, "description": "The body is not JSON."},
  413: {"model": schema.Error, "description": "The body is too long."},
  415: {"model": schema.Error, "description": "The body is neither JSON nor a picture."},
}
_MEDIA = [f"image/{kind.lower()}" for kind in image_files.FORMATS]
_JSON_OR_PICTURE = {
  "requestBody": {
    "required": True,
    "content": {"application/json": {"schema": schema.Batch.model_json_schema()}}
    | {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _MEDIA},
  }
}
_Id = Annotated[str, fastapi.Path(pattern="^[0-9a-f]{16}$", description="Image id.")]
_Top = Annotated[
  int, fastapi.Query(ge=1, le=LIMITS["top"], description="Maximum number of results.")
]


def make(service: Service, hosts=("localhost",), token="", base="", log=None) -> fastapi.FastAPI:
  """The ASGI application; `hosts` are the names that requests may be addressed to."""

  @contextlib.asynccontextmanager
  async def lifespan(_):
    async with service.watching():
      yield

  app = fastapi.FastAPI(
    title="xe_retrieval",
    version="1",
    description="Image search that can answer that nothing is relevant. Scores are cosines; the "
    "probability beside a score is that of this image being relevant to this query in this "
    "collection, measured as /api/about says. Ask for at most one of min_probability, max_wrong, "
    "min_precision and threshold. Addresses are relative to that of the page.",
    docs_url=None,  # Swagger UI and ReDoc load scripts from a CDN; /api is a page of our own
    redoc_url=None,
    openapi_url="/api/openapi.json",
    redirect_slashes=False,
    lifespan=lifespan,
  )
  metrics = operations.Metrics(service)
  app.add_middleware(
    middleware.RequestLimits,
    hosts=hosts,
    token=token,
    open_paths={"/healthz", *_addresses()},
    base=base,
  )
  app.add_middleware(operations.Observed, metrics=metrics, log=log)
  _errors(app)
  _files(app)
  operations.add_routes(app, service, metrics)
  _searches(app, service)
  _images(app, service)
  return app


def _searches(app, service):
  @app.get("/api/search", response_model=schema.Answer, responses=_WRONG | _FULL | _UNKNOWN)
  async def search(asked: Annotated[schema.Search, fastapi.Query()]):
    """Relevant images for words (q), images like a picture (like), or both; best first."""
    found = await service.search([asked.q] if asked.q else [], dict(asked), asked.like)
    return JSONResponse(found[0])

  @app.post(
    "/api/search",
    response_model=schema.Answer | list[schema.Answer],
    responses=_WRONG | _FULL | _BODY,
    openapi_extra=_JSON_OR_PICTURE,
  )
  async def search_body(request: fastapi.Request, asked: Annotated[schema.Upload, fastapi.Query()]):
    """Several queries at once as JSON, answers in the same order; or a picture as the body, with
    the parameters of GET in the address and one answer."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/"):
      id = await service.picture(await request.body())
      return JSONResponse((await service.search([asked.q] if asked.q else [], dict(asked), id))[0])
    if kind not in ("application/json", ""):
      raise HTTPException(415, f"{kind} should be application/json, or image/… for a picture")
    if request.query_params:
      raise InvalidRequest("with a body of JSON, options belong there and not into the address")
    try:
      batch = schema.Batch.model_validate_json(await request.body())
    except pydantic.ValidationError as e:
      errors = [error | {"loc": ("body", *error["loc"])} for error in e.errors()]
      raise RequestValidationError(errors) from e
    return JSONResponse(await service.search(batch.queries, dict(batch)))

  @app.get(
    "/api/export",
    response_class=Response,
    responses={
      200: {"content": {kind: {} for kind in ("text/csv", "application/json", "text/plain")}},
      **_WRONG,
      **_FULL,
      **_UNKNOWN,
    },
  )
  async def export(asked: Annotated[schema.Export, fastapi.Query()]):
    """All results of a search as a file, with the full path of each."""
    queries = [asked.q] if asked.q else []
    content, kind = await service.export(queries, dict(asked), asked.format, asked.like)
    name = f'attachment; filename="results.{asked.format}"'
    return Response(content, media_type=kind, headers={"content-disposition": name})

  @app.get("/api/rerank", response_model=schema.Reranked, responses=_WRONG | _FULL)
  async def rerank(asked: Annotated[schema.Rerank, fastapi.Query()]):
    """The first candidates for words in the order of a re-ranker; slower than /api/search."""
    return JSONResponse(await service.rerank(asked.q, dict(asked)))

  @app.get("/api/curve", response_model=schema.Curve, responses=_WRONG | _FULL)
  async def curve(q: Annotated[schema.Text, fastapi.Query(description="Text to search for.")]):
    """How many images have at least each score, for one query and for captions beside it."""
    return JSONResponse(await service.curve(q))


def _images(app, service):
  @app.get("/api/similar/{id}", response_model=schema.Similar, responses=_WRONG | _FULL | _UNKNOWN)
  async def similar(id: _Id, top: _Top = 20):
    """Images nearest to one image of the index, and captions that fit it."""
    return JSONResponse(await service.similar(id, top))

  @app.get("/api/image/{id}", response_model=schema.Result, responses=_WRONG | _UNKNOWN)
  async def image(id: _Id):
    """Id, name and address of one image."""
    return JSONResponse(await service.image(id))

  @app.get("/api/about", response_model=schema.About)
  async def about():
    """Size and generation of the index, its calibration, and the limits of this server."""
    return JSONResponse(service.about())

  @app.get(
    "/image/{id}",
    response_class=Response,
    responses={
      200: {"content": {kind: {} for kind in ("image/jpeg", "image/png", "image/svg+xml")}},
      **_WRONG,
      **_FULL,
      **_UNKNOWN,
    },
  )
  async def picture(
    id: _Id,
    large: Annotated[bool, fastapi.Query(description="1280 pixels instead of 320.")] = False,
  ):
    """A thumbnail of the image; a placeholder if its file is missing or damaged."""
    content, kind = await service.thumbnail(id, thumbnails.SIDES[large])
    caching = "no-store" if kind == "image/svg+xml" else "private, max-age=300"
    return Response(content, media_type=kind, headers={"cache-control": caching})


def _addresses():
  """{address: file} of the page."""
  files = {f"/{path.name}": path.name for path in _FOLDER.iterdir() if path.suffix in _KINDS}
  return {address: file for address, file in files.items() if file not in _PAGES.values()} | _PAGES


def _files(app):
  for address, file in _addresses().items():
    content = (_FOLDER / file).read_bytes()
    kind = _KINDS[pathlib.Path(file).suffix]
    kind += "" if kind.startswith("image/") else "; charset=utf-8"
    headers = {"cache-control": "no-cache", "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    # Default arguments bind this file; a closure would see the last one.
    async def get(request: fastapi.Request, content=content, kind=kind, headers=headers):
      if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
      return Response(content, media_type=kind, headers=headers)

    app.add_route(address, get, methods=["GET"], include_in_schema=False)


def _errors(app):
  """Every error response is one sentence in {"detail": …}."""

  @app.exception_handler(RequestValidationError)
  async def invalid(_, error):
    first = error.errors()[0]
    if first["type"] == "json_invalid":
      return JSONResponse({"detail": "the body is not JSON"}, 400)
    field = ".".join(str(part) for part in first["loc"][1:]) or first["loc"][0]
    if first["type"] == "extra_forbidden":
      return JSONResponse({"detail": f"{field}: there is no such option; see /api"}, 422)
    return JSONResponse({"detail": f"{field}: {first['msg']}"}, 422)

  @app.exception_handler(InvalidRequest)
  async def cannot_answer(_, error):
    return JSONResponse({"detail": str(error)}, 422)

  @app.exception_handler(Unavailable)
  async def unavailable(_, error):
    return JSONResponse({"detail": str(error)}, 503, {"retry-after": "5"})

  @app.exception_handler(Busy)
  async def busy(_, error):
    sentence = f"more than {LIMITS['waiting']} requests are waiting; ask again in a second"
    return JSONResponse({"detail": sentence}, 429, {"retry-after": "1"})

  @app.exception_handler(UnknownImage)
  async def unknown(_, error):
    return JSONResponse({"detail": f"the index has no image {error.args[0]}"}, 404)

  @app.exception_handler(HTTPException)
  async def other(_, error):
    return JSONResponse({"detail": str(error.detail)}, error.status_code, error.headers)
