"""The routes: the page, a JSON API with an OpenAPI description, and thumbnails of the images."""

import contextlib
import hashlib
import pathlib
from typing import Annotated

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from xe_retrieval.serving import middleware, thumbnails
from xe_retrieval.serving.batching import Busy
from xe_retrieval.serving.schema import About, Answer, Batch, Error, Result, Similar
from xe_retrieval.serving.service import LIMITS, InvalidRequest, Service, UnknownImage

_FILES = {  # address -> (file, media type)
  "/": ("page.html", "text/html; charset=utf-8"),
  "/page.css": ("page.css", "text/css; charset=utf-8"),
  "/page.js": ("page.js", "text/javascript; charset=utf-8"),
  "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_WRONG = {422: {"model": Error, "description": "The request is invalid; `detail` says why."}}
_FULL = {429: {"model": Error, "description": "Too many requests are waiting; try again."}}
_UNKNOWN = {404: {"model": Error, "description": "No image in the index has this id."}}
_BODY = {
  400: {"model": Error, "description": "The body is not JSON."},
  413: {"model": Error, "description": "The body is too long."},
}
_Id = Annotated[str, fastapi.Path(pattern="^[0-9a-f]{16}$", description="Image id.")]
_Top = Annotated[
  int, fastapi.Query(ge=1, le=LIMITS["top"], description="Maximum number of results.")
]
_Query = Annotated[
  str,
  fastapi.Query(
    min_length=1, max_length=LIMITS["query"], pattern=r"\S", description="Text to search for."
  ),
]
_Probability = Annotated[
  float | None,
  fastapi.Query(
    ge=0,
    le=1,
    allow_inf_nan=False,
    description="Minimum probability of each result; 0.5 if nothing else is asked for.",
  ),
]
_Wrong = Annotated[
  float | None,
  fastapi.Query(
    ge=0, allow_inf_nan=False, description="Irrelevant results per query, at most, in the mean."
  ),
]
_Precision = Annotated[
  float | None,
  fastapi.Query(
    ge=0, le=1, allow_inf_nan=False, description="Minimum precision of all results of many queries."
  ),
]
_Guarantee = Annotated[
  bool, fastapi.Query(description="The lower bound of the precision must reach min_precision.")
]
_Threshold = Annotated[
  float | None,
  fastapi.Query(ge=-1, le=1, allow_inf_nan=False, description="Minimum cosine of the results."),
]
_Near = Annotated[
  int, fastapi.Query(ge=0, le=LIMITS["top"], description="Maximum number of near misses.")
]


def make(service: Service, hosts=("localhost",)) -> fastapi.FastAPI:
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
    "min_precision and threshold.",
    docs_url=None,  # Swagger UI and ReDoc load scripts from a CDN
    redoc_url=None,
    openapi_url="/api/openapi.json",
    redirect_slashes=False,
    lifespan=lifespan,
  )
  app.add_middleware(
    middleware.RequestLimits,
    hosts=hosts,
    max_address=LIMITS["address"],
    max_body=LIMITS["body"],
  )
  _errors(app)
  _files(app)

  @app.get("/api/search", response_model=Answer, responses=_WRONG | _FULL)
  async def search(
    q: _Query,
    min_probability: _Probability = None,
    max_wrong: _Wrong = None,
    min_precision: _Precision = None,
    threshold: _Threshold = None,
    guarantee: _Guarantee = False,
    top: _Top = 20,
    near: _Near = 0,
  ):
    """Relevant images for one query, best first; none if nothing is relevant."""
    found = await service.search(
      [q],
      top,
      near,
      min_probability=min_probability,
      max_wrong=max_wrong,
      min_precision=min_precision,
      threshold=threshold,
      guarantee=guarantee,
    )
    return JSONResponse(found[0])

  @app.post("/api/search", response_model=list[Answer], responses=_WRONG | _FULL | _BODY)
  async def search_batch(batch: Batch):
    """Several queries at once; answers in the same order."""
    return JSONResponse(await service.search(**batch.model_dump()))

  @app.get("/api/similar/{id}", response_model=Similar, responses=_WRONG | _FULL | _UNKNOWN)
  async def similar(id: _Id, top: _Top = 20):
    """Images nearest to one image of the index, and captions that fit it."""
    return JSONResponse(await service.similar(id, top))

  @app.get("/api/image/{id}", response_model=Result, responses=_WRONG | _UNKNOWN)
  async def image(id: _Id):
    """Id, name and address of one image."""
    return JSONResponse(service.image(id))

  @app.get("/api/about", response_model=About)
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

  return app


def _files(app):
  folder = pathlib.Path(__file__).parent
  for address, (file, kind) in _FILES.items():
    content = (folder / file).read_bytes()
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
    return JSONResponse({"detail": f"{field}: {first['msg']}"}, 422)

  @app.exception_handler(InvalidRequest)
  async def cannot_answer(_, error):
    return JSONResponse({"detail": str(error)}, 422)

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
