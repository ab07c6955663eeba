"""Serve: python -m xe_retrieval.serve --index=I

A search page and a JSON API (/api/search?q=…, described at /api). The server listens on this
machine only unless --host says otherwise; --token=SECRET lets in only who knows it. It reloads the
index by itself when python -m xe_retrieval.index has updated it. /healthz and /metrics (Prometheus)
are for whoever runs it. SIGTERM and Ctrl-C answer the requests at hand, then end it.
"""

import pathlib
import re
import socket
import sys
import webbrowser

from absl import app, flags

from xe_retrieval import config as config_lib


def serve(
  index,
  host="127.0.0.1",
  port=8000,
  workdir="",
  allowed_hosts=(),
  token="",
  base_path="",
  access_log="",
  open_page=False,
  rerank="",
  candidates=128,
):
  """Runs the server until it is interrupted."""
  import uvicorn

  from xe_retrieval.serving import app as apps
  from xe_retrieval.serving.protocol import LimitedProtocol
  from xe_retrieval.serving.service import Service

  listener = _listen(host, port)
  log = _log(access_log)
  service = Service(index, workdir, rerank=rerank, candidates=candidates)
  service.warm_up()
  hosts = ["localhost", socket.gethostname().lower(), *allowed_hosts]
  config = uvicorn.Config(
    apps.make(service, hosts, token, base_path, log),
    http=LimitedProtocol,
    log_level="error",  # "warning" would log every malformed request
    access_log=False,
    server_header=False,
    timeout_keep_alive=30,
    timeout_graceful_shutdown=5,
  )
  name = f"[{host}]" if ":" in host else host
  images = len(service.searcher.collection)
  address = f"http://{name}:{listener.getsockname()[1]}{base_path}/"
  print(f"{images:,} images: {address}  (Ctrl-C ends it)", flush=True)
  if service.searcher.calibration is None:
    print("the model was not evaluated: results have no probability", file=sys.stderr)
  if open_page:
    webbrowser.open(address)
  uvicorn.Server(config).run(sockets=[listener])


def main(argv):
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}; the index is named as --index={argv[1]}")
  f = flags.FLAGS
  try:
    hosts = [name.lower() for name in f.allowed_hosts]
    token, base = _token(f.token), _base(f.base_path)
    second = {"rerank": f.rerank, "candidates": f.candidates}
    serve(f.index, f.host, f.port, f.workdir, hosts, token, base, f.access_log, f.open, **second)
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


def _log(path):
  return sys.stdout if path == "-" else open(path, "a") if path else None


def _token(text):
  """SECRET, or what is in FILE for @FILE."""
  token = pathlib.Path(text[1:]).read_text().strip() if text.startswith("@") else text
  if text and not token:
    raise ValueError(f"--token={text} holds no token")
  return token


def _base(path):
  path = path.rstrip("/")
  if path and not re.fullmatch(r"(/[\w.~-]+)+", path):
    raise ValueError(f"--base_path={path} should begin with a slash, as in /search")
  return path


def _define_flags():
  flags.DEFINE_string(
    "index", None, "Directory written by python -m xe_retrieval.index.", required=True
  )
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces.")
  flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any free port.", 0, 65_535)
  flags.DEFINE_string("workdir", "", "Where the model is, if it has moved since indexing.")
  flags.DEFINE_string(
    "rerank", "", "Workdir of a re-ranker, for which index --tokens was run: orders results anew."
  )
  flags.DEFINE_integer("candidates", 128, "With --rerank: images that it reads per query.", 1)
  flags.DEFINE_list(
    "allowed_hosts",
    [],
    "Further names that this server is reached by, besides localhost, the name of this machine "
    "and IP addresses; *: any.",
  )
  flags.DEFINE_string(
    "token",
    "",
    "Secret that requests need (Authorization: Bearer …) and that the page asks for; @FILE reads "
    "it from a file, where ps does not show it.",
  )
  flags.DEFINE_string("base_path", "", "Path under which a proxy shows this server, as in /search.")
  flags.DEFINE_string(
    "access_log",
    "",
    "File to add a line of JSON to for each request, without the words; -: stdout.",
  )
  flags.DEFINE_bool("open", False, "Open the page in a browser.")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=config_lib.parse_flags)
