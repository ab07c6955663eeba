"""Serve: python -m xe_retrieval.serve --index=I

A search page in the browser, and a JSON API beside it (/api/search?q=…, described by
/api/openapi.json). For this machine only, unless --host says otherwise: there is no password.
When `index` brings the index up to date, the server takes it over by itself.
"""

import socket
import sys

from absl import app, flags

from xe_retrieval import command_line

LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(index, host="127.0.0.1", port=8000, workdir=""):
  """Until it is interrupted."""
  import uvicorn

  from xe_retrieval.serving import app as apps
  from xe_retrieval.serving import state as states

  listener = _listen(host, port)
  state = states.State(index, workdir)
  state.warm_up()
  config = uvicorn.Config(
    apps.make(state, local=host in LOCAL),
    log_level="error",  # less would tell of every request that is not HTTP
    access_log=False,
    server_header=False,
    timeout_keep_alive=30,
    timeout_graceful_shutdown=5,
  )
  name = f"[{host}]" if ":" in host else host
  images = len(state.searcher.collection)
  print(
    f"{images:,} images: http://{name}:{listener.getsockname()[1]}  (Ctrl-C ends it)", flush=True
  )
  if state.searcher.cutoffs is None:
    print("the model was not evaluated: results come without precision", file=sys.stderr)
  uvicorn.Server(config).run(sockets=[listener])


def main(argv):
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}; the index is named as --index={argv[1]}")
  command_line.quieten()
  f = flags.FLAGS
  try:
    serve(f.index, f.host, f.port, f.workdir)
  except (OSError, ValueError) as e:
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    pass


def _listen(host, port):
  """Before the model is loaded: a taken port should not be news after half a minute."""
  try:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
  except OSError as e:
    raise ValueError(f"cannot listen on {host}:{port}: {e.strerror}; --port chooses another") from e


def _define_flags():
  flags.DEFINE_string("index", None, "What python -m xe_retrieval.index made.", required=True)
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for everyone.")
  flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any that is free.", 0, 65_535)
  flags.DEFINE_string("workdir", "", "Where the model is, if it was moved.")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=command_line.parse)
