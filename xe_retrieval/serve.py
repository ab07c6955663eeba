"""Serve: python -m xe_retrieval.serve --index=I

A search page and a JSON API (/api/search?q=…, described by /api/openapi.json). There is no
password, so the server listens on this machine only unless --host says otherwise. It reloads the
index by itself when python -m xe_retrieval.index has updated it.
"""

import socket
import sys

from absl import app, flags

from xe_retrieval import config as config_lib


def serve(index, host="127.0.0.1", port=8000, workdir="", allowed_hosts=()):
  """Runs the server until it is interrupted."""
  import uvicorn

  from xe_retrieval.serving import app as apps
  from xe_retrieval.serving.service import Service

  listener = _listen(host, port)
  service = Service(index, workdir)
  service.warm_up()
  config = uvicorn.Config(
    apps.make(service, hosts=["localhost", socket.gethostname().lower(), *allowed_hosts]),
    log_level="error",  # "warning" would log every malformed request
    access_log=False,
    server_header=False,
    timeout_keep_alive=30,
    timeout_graceful_shutdown=5,
  )
  name = f"[{host}]" if ":" in host else host
  images = len(service.searcher.collection)
  print(
    f"{images:,} images: http://{name}:{listener.getsockname()[1]}  (Ctrl-C ends it)", flush=True
  )
  if service.searcher.calibration is None:
    print("the model was not evaluated: results have no probability", file=sys.stderr)
  uvicorn.Server(config).run(sockets=[listener])


def main(argv):
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}; the index is named as --index={argv[1]}")
  f = flags.FLAGS
  try:
    serve(f.index, f.host, f.port, f.workdir, [name.lower() for name in f.allowed_hosts])
  except (OSError, ValueError) as e:
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    pass


def _listen(host, port):
  """Binds the port before the model is loaded, so that a port in use fails at once."""
  try:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
  except OSError as e:
    raise ValueError(f"cannot listen on {host}:{port}: {e.strerror}; --port chooses another") from e


def _define_flags():
  flags.DEFINE_string(
    "index", None, "Directory written by python -m xe_retrieval.index.", required=True
  )
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces.")
  flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any free port.", 0, 65_535)
  flags.DEFINE_string("workdir", "", "Where the model is, if it has moved since indexing.")
  flags.DEFINE_list(
    "allowed_hosts",
    [],
    "Further names that this server is reached by, besides localhost, the name of this machine "
    "and IP addresses; *: any.",
  )


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=config_lib.parse_flags)
