"""A server of Google Cloud Storage's API in memory: python tests/object_store.py PORT

gcp-storage-emulator, and what gcsfs and TensorStore need beyond it: objects can be moved, downloads
tell their generation, and requests are conditional on it.
"""

import sys
from http import HTTPStatus

from gcp_storage_emulator import exceptions, server
from gcp_storage_emulator.handlers import objects

BUCKET = "bucket"
_MOVE = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<target>.+)$"


def move(request, response, storage):
  bucket, name, target = (request.params[x] for x in ("bucket_name", "object_id", "target"))
  if not generation(storage, bucket, name):
    response.status = HTTPStatus.NOT_FOUND
    return
  response.json(objects._copy(request.base_url, storage, bucket, name, bucket, target))
  objects._delete(storage, bucket, name)


def generation(storage, bucket, name):
  """As text; "" if there is no such object."""
  try:
    return storage.get_file_obj(bucket, name)["generation"]
  except exceptions.NotFound:
    return ""


def conditional(handler):
  """The handler if the request's conditions hold."""

  def handle(request, response, storage):
    names = (request.params.get("object_id"), *request.query.get("name", ()))
    name = next((name for name in names if name), "")
    now = generation(storage, request.params["bucket_name"], name)
    if request.query.get("ifGenerationMatch", [now or "0"])[0] != (now or "0"):
      response.status = HTTPStatus.PRECONDITION_FAILED
    elif now and request.query.get("ifGenerationNotMatch", ["-1"])[0] == now:
      response.status = HTTPStatus.NOT_MODIFIED
    else:
      response["x-goog-generation"] = now
      handler(request, response, storage)

  return handle


def main():
  limited = {f: conditional(f) for f in (objects.get, objects.insert, objects.delete)}
  objects.insert = limited[objects.insert]
  routes = [
    (route, {method: limited.get(f, f) for method, f in handlers.items()})
    for route, handlers in server.HANDLERS
  ]
  server.HANDLERS = ((_MOVE, {server.POST: move}), *routes)
  server.create_server("localhost", int(sys.argv[1]), in_memory=True, default_bucket=BUCKET).run()


if __name__ == "__main__":
  main()
