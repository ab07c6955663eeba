"""Reaching Milvus, and the collection of it that belongs to an index.

The same client opens a file ending in .db, by milvus-lite in this process, and the address of a
server. A token comes from the environment, MILVUS_TOKEN, and is written nowhere. INDEX/owner is a
random text that the collection carries too, so that no index writes to the collection of another.
"""

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import re
import secrets
import time
import urllib.parse

from xe_retrieval.search.stores.store import Unavailable

OWNER = "owner"
READING, WRITING = 5, 120  # seconds that a call to a server may take
HERE = 3600  # the same in this process, where no network hangs, but lists of queries take long
PAUSE = 1  # seconds in which all calls fail at once, after one that has waited in vain
LEAVES = 1024  # of ScaNN, which has no number of its own by default
INDEXES = {"FLAT": {}, "HNSW": {"M": 24, "efConstruction": 200}, "SCANN": {"nlist": LEAVES}}


def is_file(uri) -> bool:
  return not uri.startswith(("http://", "https://"))


def place(path, uri) -> str:
  """What the manifest of the index at `path` says: a file inside it moves with it."""
  if not is_file(uri):
    if urllib.parse.urlsplit(uri).username:
      raise ValueError(
        f"{_public(uri)} has a password in it; MILVUS_TOKEN=user:password is for that"
      )
    return uri
  if "://" in uri or not uri.endswith(".db"):
    raise ValueError(f"{uri} is neither http://… nor a file of milvus-lite, whose name ends in .db")
  file, index = (pathlib.Path(x).expanduser().resolve() for x in (uri, path))
  return str(file.relative_to(index) if file.is_relative_to(index) else file)


def connect(path, uri):
  """A client, for the manifest's `uri` of the index at `path`."""
  try:
    import pymilvus

    if is_file(uri):
      import milvus_lite  # noqa: F401
  except ImportError as e:
    raise ValueError(
      f"vectors in Milvus need pymilvus and, for files, milvus-lite ({e}): "
      "pip install 'xe_retrieval[milvus]'"
    ) from None
  # They log tracebacks of errors that are raised as well, and of what milvus-lite does not have.
  for name in ("pymilvus", "milvus_lite", *["grpc._server"] * is_file(uri)):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  file = pathlib.Path(path).expanduser().resolve() / uri if is_file(uri) else None
  if file:
    file.parent.mkdir(parents=True, exist_ok=True)
  token = os.environ.get("MILVUS_TOKEN", "")
  try:
    with asking(uri):
      client = pymilvus.MilvusClient(str(file or uri), token="" if file else token, timeout=20)
      client.version = client.get_server_version()
  except ValueError:
    if file and _locked(file / "LOCK"):
      raise ValueError(
        f"{file} is open in another process, such as serve, and milvus-lite lets one at a time: "
        "end that one, or keep the vectors in a Milvus server (http://…), which many can use"
      ) from None
    raise
  client.file = file
  return client


def _locked(path):
  try:
    with open(path) as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:
    pass
  return False


@contextlib.contextmanager
def asking(uri):
  """What Milvus or the connection to it complains of, in one sentence."""
  import grpc
  import pymilvus

  try:
    yield
  except (pymilvus.MilvusException, grpc.RpcError, OSError) as e:
    said = getattr(e, "message", "") or getattr(e, "details", lambda: "")() or str(e)
    said = re.sub(r"stack trace: .*?goexit: ", "", " ".join(str(said).split()))  # of a server
    raise Unavailable(f"Milvus at {_public(uri)}: {said[:300]}") from e


class Calls:
  """Calls about the collection of a manifest, each of which ends in time."""

  def __init__(self, client, about, writing):
    self._client, self._uri, self._name = client, about["uri"], about["collection"]
    self.seconds = HERE if client.file else WRITING if writing else READING
    self._failed = 0.0, ""

  def __call__(self, method, **more):
    until, sentence = self._failed
    start = time.monotonic()
    if start < until:  # requests that wait in a queue would wait in vain one after the other
      raise Unavailable(sentence)
    try:
      with asking(self._uri):
        return getattr(self._client, method)(self._name, timeout=self.seconds, **more)
    except Unavailable as e:
      if time.monotonic() > start + 0.9 * self.seconds:
        self._failed = time.monotonic() + PAUSE, str(e)
      raise


def _public(uri):
  return uri.rpartition("@")[2]


def check(client, about) -> str:
  """That the collection is there, and that of this index -> the kind of its vectors' index, which
  an interrupted `build` may have left out or made another one than the manifest says."""
  name, uri = about["collection"], about["uri"]
  with asking(uri):
    if not client.has_collection(name):
      raise ValueError(
        f"Milvus at {uri} has no collection {name}: if it was dropped, index anew with --rebuild"
      )
    found = client.describe_collection(name)
    if _owner(found) != about["owner"]:
      raise ValueError(f"the collection {name} of Milvus at {uri} is not that of this index")
    width = next(f["params"]["dim"] for f in found["fields"] if f["name"] == "vector")
    if int(width) != about["width"]:
      raise ValueError(
        f"the collection {name} of Milvus at {uri} has vectors of {width} dimensions, "
        f"the index says {about['width']}"
      )
    if not client.list_indexes(name, "vector"):
      _index(client, name, about["built"])
    kind = (client.describe_index(name, "vector") or {}).get("index_type", about["built"])
    client.load_collection(name)
  return kind


def drop(client, about):
  """What a rebuilt collection takes the place of, if it is there and of this index."""
  name = about["collection"]
  with asking(about["uri"]):
    if client.has_collection(name) and _owner(client.describe_collection(name)) == about["owner"]:
      client.drop_collection(name)


def _owner(found):
  """milvus-lite keeps properties, a server descriptions."""
  return found.get("description") or found.get("properties", {}).get(OWNER, "")


def create(client, path, about, fields) -> dict:
  """An empty collection with `fields` {name: type of pymilvus} -> what the manifest says of it.

  One that an interrupted run of this index has left is replaced; the one that the manifest names
  stays until the new one takes its place.
  """
  import pymilvus

  path, uri = pathlib.Path(path).expanduser(), about["uri"]
  about = {"index": "auto"} | about | {"owner": _own(path), "update": 0, "images": 0}
  about |= {"collection": _free_name(path, about), "built": "FLAT"}
  name = about["collection"]
  with asking(uri):
    if client.has_collection(name):
      if _owner(client.describe_collection(name)) != about["owner"]:
        raise ValueError(
          f"Milvus at {uri} has a collection {name} already, which is not that of {path}: "
          "give --store another name, or drop that collection"
        )
      client.drop_collection(name)
    schema = client.create_schema(enable_dynamic_field=True, description=about["owner"])
    schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
    schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=about["width"])
    for field, settings in fields.items():
      schema.add_field(field, **settings)
    more = {"properties": {OWNER: about["owner"]}} if is_file(uri) else {}
    client.create_collection(name, schema=schema, consistency_level="Strong", **more)
    if not _owner(client.describe_collection(name)):  # milvus-lite behind an address
      client.alter_collection_properties(name, {OWNER: about["owner"]})
    _index(client, name, "FLAT")
    client.load_collection(name)
  return about


def _own(path):
  file = path / OWNER
  if not file.exists():
    path.mkdir(parents=True, exist_ok=True)
    part = path / f"{OWNER}.part"
    part.write_text(secrets.token_hex(8))
    _sync(part)
    part.replace(file)
    _sync(path)
  return file.read_text().strip()


def _free_name(path, about):
  """The name, or a second one while the collection of that name is still served."""
  try:
    served = json.loads((path / "collection.json").read_text())["store"]
  except (OSError, ValueError, KeyError):
    served = {}
  taken = served.get("uri") == about["uri"] and served.get("collection") == about["name"]
  return f"{about['name']}_rebuilt" if taken else about["name"]


def build(client, name, kind):
  """Replaces the vectors' index by one of another kind."""
  import pymilvus

  for last in (False, True):
    client.release_collection(name)
    client.drop_index(name, "vector")
    try:
      _index(client, name, kind)
      break
    except pymilvus.MilvusException:  # a reader that found none has made one in between
      if last:
        raise
  client.load_collection(name)


def _index(client, name, kind):
  wanted = client.prepare_index_params()
  wanted.add_index(
    "vector", index_name="vector", index_type=kind, metric_type="IP", params=INDEXES[kind]
  )
  client.create_index(name, wanted)


def effort(kind, k, exact) -> dict:
  """How far an approximate index looks."""
  if kind == "HNSW":
    return {"ef": 32_768 if exact else max(256, 2 * k)}
  if kind == "SCANN":
    return {"nprobe": LEAVES if exact else 128, "reorder_k": max(10 * k, 600)}
  return {}


def sync(file):
  """milvus-lite writes its files without waiting until they are on the disk."""
  for directory, _, names in os.walk(file):
    for name in names:
      with contextlib.suppress(FileNotFoundError):  # compacted away
        _sync(os.path.join(directory, name))
    _sync(directory)


def _sync(path):
  number = os.open(path, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)
