"""Where the vectors of a collection lie: opened by what its manifest says, or made."""

import pathlib


def open(path, about: dict, columns: dict[str, str], writing=False):
  """The store of the collection at `path`: manifest["store"], manifest["columns"]."""
  if about["kind"] == "files":
    from xe_retrieval.search.stores import files

    return files.FileStore(pathlib.Path(path), about, columns, writing)
  raise ValueError(f"{path}: vectors lie in {about['kind']!r}, which this version does not know")


def create(path, about: dict, columns: dict[str, str], width: int):
  """An empty one to write to; what `parse` returned, with `precision` and `index` for files."""
  if about["kind"] == "files":
    from xe_retrieval.search.stores import files

    about = about | {"width": width, "segments": []}
    return files.FileStore(pathlib.Path(path), about, columns, writing=True)
  raise ValueError(f"{path}: vectors cannot be kept in {about['kind']!r} by this version")


def place(about: dict) -> dict:
  """Of what the manifest says: where vectors lie, as `parse` gives it."""
  return {name: about[name] for name in ("kind", "uri", "name") if name in about}


def parse(text: str) -> dict:
  """--store: "" is files in the index itself; milvus:URI,NAME is a collection of Milvus."""
  if not text:
    return {"kind": "files"}
  kind, _, rest = text.partition(":")
  uri, _, name = rest.rpartition(",")
  if kind == "milvus" and uri and name:
    return {"kind": "milvus", "uri": uri, "name": name}
  raise ValueError(
    f"--store={text}: expected nothing, for files, or milvus:URI,NAME as in "
    "milvus:vectors.db,photos or milvus:http://host:19530,photos"
  )
