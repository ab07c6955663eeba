"""A small Hugging Face Hub on this machine: repositories in memory, as far as a model needs it."""

import base64
import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse


class Hub(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  repositories = {}  # id -> [(commit, {path: bytes})], the newest last

  def log_message(self, *_):
    pass

  def do_POST(self):
    body = self.rfile.read(int(self.headers.get("content-length", 0)))
    parts = urllib.parse.urlparse(self.path).path.strip("/").split("/")
    if parts == ["api", "repos", "create"]:
      asked = json.loads(body)
      name = f"{asked.get('organization') or 'me'}/{asked['name']}"
      self.repositories.setdefault(name, [("0" * 40, {})])
      return self._json({"url": f"{self._address()}/{name}", "name": name})
    if parts == ["api", "validate-yaml"]:  # of the model card
      return self._json({"errors": [], "warnings": []})
    name = "/".join(parts[2:4])
    if parts[4] == "preupload":
      files = json.loads(body)["files"]
      regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
      return self._json({"files": [{"path": f["path"]} | regular for f in files]})
    files = dict(self.repositories[name][-1][1])
    for line in map(json.loads, body.splitlines()):
      if line["key"] == "file":
        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
    commit = hashlib.sha1(body).hexdigest()
    self.repositories[name].append((commit, files))
    address = f"{self._address()}/{name}/commit/{commit}"
    return self._json({"success": True, "commitOid": commit, "commitUrl": address})

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    parts = urllib.parse.unquote(urllib.parse.urlparse(self.path).path).strip("/").split("/")
    if parts == ["api", "whoami-v2"]:
      return self._json({"name": "me", "type": "user", "orgs": []})
    if parts[:2] == ["api", "models"]:
      name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
      found = self._at(name, revision)
      if not found:
        return self._missing(name)
      commit, files = found
      if len(parts) > 4 and parts[4] == "tree":
        return self._json(
          [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in files.items()
          ]
        )
      siblings = [{"rfilename": path} for path in files]
      return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
    if len(parts) < 5:  # what the library asks for beside models
      return self._send(404, b"", {})
    name, revision, path = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
    found = self._at(name, revision)
    if not found:
      return self._missing(name)
    commit, files = found
    if path not in files:
      return self._send(404, b"", {"x-error-code": "EntryNotFound", "x-repo-commit": commit})
    etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
    return self._send(200, files[path], {"etag": etag, "x-repo-commit": commit})

  def _at(self, name, revision):
    commits = self.repositories.get(name, [])
    wanted = [c for c in commits if revision == "main" or c[0] == revision]
    return wanted[-1] if wanted else None

  def _missing(self, name):
    kind = "RevisionNotFound" if name in self.repositories else "RepoNotFound"
    self._send(404, b"", {"x-error-code": kind})

  def _address(self):
    return f"http://127.0.0.1:{self.server.server_port}"

  def _json(self, value):
    self._send(200, json.dumps(value).encode(), {"content-type": "application/json"})

  def _send(self, status, body, headers):
    self.send_response(status)
    for name, value in ({"content-length": str(len(body))} | headers).items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)


@contextlib.contextmanager
def running():
  """Yields its address, for HF_ENDPOINT."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
  Hub.repositories = {}
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
