"""For whoever runs the server: /healthz, /metrics for Prometheus, and an access log."""

import datetime
import json
import time

import prometheus_client
from fastapi.responses import JSONResponse, Response
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_GAUGES = {
  "queue": "Queries that wait.",
  "pictures": "Uploaded pictures that wait.",
  "decoding": "Thumbnails being made.",
  "cached_queries": "Embedded queries in memory.",
  "cached_thumbnail_bytes": "Size of the thumbnails in memory.",
  "images": "Images in the index.",
  "generation": "Generation of the index.",
}


class Observed:
  """ASGI middleware: counts and times requests by route, and logs each as a line of JSON.

  The log has the path and not what was searched for, which is nobody's business.
  """

  def __init__(self, app, metrics, log=None):
    self.app, self.metrics, self.log = app, metrics, log

  async def __call__(self, scope, receive, send):
    if scope["type"] != "http":
      return await self.app(scope, receive, send)
    start, status, size = time.perf_counter(), 500, 0

    async def counting_send(message):
      nonlocal status, size
      status = message.get("status", status)
      size += len(message.get("body", b""))
      await send(message)

    self.metrics.active.inc()
    try:
      await self.app(scope, receive, counting_send)
    finally:
      seconds = time.perf_counter() - start
      self.metrics.active.dec()
      # Not the path, which anybody may make up: there would be no end of counters.
      route = getattr(scope.get("route"), "path", "other")
      self.metrics.requests.labels(route, scope["method"], status).inc()
      self.metrics.seconds.labels(route).observe(seconds)
      if self.log:
        self._write(scope, status, seconds, size)

  def _write(self, scope, status, seconds, size):
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = {
      "time": now,
      "client": (scope.get("client") or ["?"])[0],
      "method": scope["method"],
      "path": scope["path"],
      "status": status,
      "ms": round(1e3 * seconds, 1),
      "bytes": size,
    }
    self.log.write(json.dumps(line) + "\n")
    self.log.flush()


class Metrics:
  """Counters of one application, and what its service says of itself when it is asked."""

  def __init__(self, service):
    self._service = service
    self.registry = registry = prometheus_client.CollectorRegistry()
    self.requests = prometheus_client.Counter(
      "xe_requests", "Requests.", ["route", "method", "status"], registry=registry
    )
    self.seconds = prometheus_client.Histogram(
      "xe_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=registry
    )
    self.active = prometheus_client.Gauge(
      "xe_active_requests", "Requests being answered.", registry=registry
    )
    registry.register(self)

  def collect(self):
    sizes = self._service.sizes()
    for name, text in _GAUGES.items():
      yield GaugeMetricFamily(f"xe_{name}", text, sizes[name])
    yield CounterMetricFamily("xe_reloads", "Times that a new index was loaded.", sizes["reloads"])
    hits = CounterMetricFamily(
      "xe_query_cache", "Queries by where they came from.", labels=["from"]
    )
    hits.add_metric(["cache"], sizes["query_hits"])
    hits.add_metric(["tower"], sizes["query_misses"])
    yield hits


def add_routes(app, service, metrics):
  @app.get("/healthz", include_in_schema=False)
  async def healthz():
    about = service.sizes()
    return JSONResponse({"status": "ok", "images": about["images"], "reloads": about["reloads"]})

  @app.get("/metrics", include_in_schema=False)
  async def numbers():
    content = prometheus_client.generate_latest(metrics.registry)
    return Response(content, media_type=exposition.CONTENT_TYPE_PLAIN_0_0_4)
