"""The routes: a page, a JSON API that describes itself by OpenAPI, and the indexed pictures."""

import contextlib
import hashlib
import pathlib
from typing import Annotated

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from xe_retrieval.serving import guard, thumbnails
from xe_retrieval.serving.batching import Busy
from xe_retrieval.serving.schema import About, Answer, Batch, Error, Result, Similar
from xe_retrieval.serving.state import LIMITS, State, Unknown, Wrong

_FILES = {  # address -> (file, media type)
  "/": ("page.html", "text/html; charset=utf-8"),
  "/page.css": ("page.css", "text/css; charset=utf-8"),
  "/page.js": ("page.js", "text/javascript; charset=utf-8"),
  "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_WRONG = {422: {"model": Error, "description": "What was wrong with the request."}}
_FULL = {429: {"model": Error, "description": "Too many requests are waiting; ask again."}}
_UNKNOWN = {404: {"model": Error, "description": "No image of the index has this id."}}
_BODY = {
  400: {"model": Error, "description": "The body is not JSON."},
  413: {"model": Error, "description": "The body is too long."},
}
_Id = Annotated[str, fastapi.Path(pattern="^[0-9a-f]{16}$", description="Id of an image.")]
_Top = Annotated[int, fastapi.Query(ge=1, le=LIMITS["top"], description="At most so many.")]
_Query = Annotated[
  str,
  fastapi.Query(
    min_length=1, max_length=LIMITS["query"], pattern=r"\S", description="What to look for."
  ),
]
_Precision = Annotated[
  float | None,
  fastapi.Query(ge=0, le=1, allow_inf_nan=False, description="Precision to expect of the results."),
]
_Threshold = Annotated[
  float | None,
  fastapi.Query(ge=-1, le=1, allow_inf_nan=False, description="Cosine that results have at least."),
]
_Near = Annotated[
  int, fastapi.Query(ge=0, le=LIMITS["top"], description="At most so many near misses besides.")
]


def make(state: State, local: bool = True) -> fastapi.FastAPI:
  """The application; `local`: asked by this machine's browsers only."""

  @contextlib.asynccontextmanager
  async def lifespan(_):
    async with state.watching():
      yield

  app = fastapi.FastAPI(
    title="xe_retrieval",
    version="1",
    description="Image search with one threshold for all queries. Scores are cosines; the "
    "precision beside a score is that of returning everything from this score on, as measured in "
    "the evaluation that /api/about names.",
    docs_url=None,  # they would load scripts of another site
    redoc_url=None,
    openapi_url="/api/openapi.json",
    redirect_slashes=False,
    lifespan=lifespan,
  )
  app.add_middleware(
    guard.Guard,
    hosts=guard.LOCAL if local else None,
    max_address=LIMITS["address"],
    max_body=LIMITS["body"],
  )
  _errors(app)
  _files(app)

  @app.get("/api/search", response_model=Answer, responses=_WRONG | _FULL)
  async def search(
    q: _Query,
    min_precision: _Precision = None,
    threshold: _Threshold = None,
    top: _Top = 20,
    near: _Near = 0,
  ):
    """Images for one query: those above the threshold, best first."""
    return JSONResponse((await state.search([q], min_precision, threshold, top, near))[0])

  @app.post("/api/search", response_model=list[Answer], responses=_WRONG | _FULL | _BODY)
  async def search_batch(batch: Batch):
    """Several queries at once, answered in their order."""
    asked = (batch.min_precision, batch.threshold, batch.top, batch.near)
    return JSONResponse(await state.search(batch.queries, *asked))

  @app.get("/api/similar/{id}", response_model=Similar, responses=_WRONG | _FULL | _UNKNOWN)
  async def similar(id: _Id, top: _Top = 20):
    """Images that look like one of the index, and captions that fit it."""
    return JSONResponse(await state.similar(id, top))

  @app.get("/api/image/{id}", response_model=Result, responses=_WRONG | _UNKNOWN)
  async def image(id: _Id):
    """What is known of one image."""
    return JSONResponse(state.image(id))

  @app.get("/api/about", response_model=About)
  async def about():
    """The index, its model, its thresholds, and the limits of this server."""
    return JSONResponse(state.about())

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
    """The picture itself, made small; a placeholder if its file is gone or broken."""
    content, kind = await state.picture(id, thumbnails.SIDES[large])
    caching = "no-store" if kind == "image/svg+xml" else "private, max-age=300"
    return Response(content, media_type=kind, headers={"cache-control": caching})

  return app


def _files(app):
  folder = pathlib.Path(__file__).parent
  for address, (file, kind) in _FILES.items():
    content = (folder / file).read_bytes()
    headers = {"cache-control": "no-cache", "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def get(
      request: fastapi.Request, content=content, kind=kind, headers=headers
    ):  # one per file
      if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
      return Response(content, media_type=kind, headers=headers)

    app.add_route(address, get, methods=["GET"], include_in_schema=False)


def _errors(app):
  """Every error is one sentence in {"detail": …}."""

  @app.exception_handler(RequestValidationError)
  async def invalid(_, error):
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    broken = first["type"] == "json_invalid"
    said = "the body is not JSON" if broken else f"{where or first['loc'][0]}: {first['msg']}"
    return JSONResponse({"detail": said}, 400 if broken else 422)

  @app.exception_handler(Wrong)
  async def wrong(_, error):
    return JSONResponse({"detail": str(error)}, 422)

  @app.exception_handler(Busy)
  async def busy(_, error):
    said = f"more than {LIMITS['waiting']} requests are waiting; ask again in a second"
    return JSONResponse({"detail": said}, 429, {"retry-after": "1"})

  @app.exception_handler(Unknown)
  async def unknown(_, error):
    return JSONResponse({"detail": f"the index has no image {error.args[0]}"}, 404)

  @app.exception_handler(HTTPException)
  async def other(_, error):
    return JSONResponse({"detail": str(error.detail)}, error.status_code, error.headers)
