"""Which images of a collection are searched: those of a source or folder, those of certain dates.

A folder is named as "photos/2019/june": the source, then the path in it. The date of an image is
when its file was last changed; images of data sets have none.
"""

import datetime
import functools
import os

import numpy as np

DAY = 86_400 * 10**9  # nanoseconds
EPOCH = datetime.date(1970, 1, 1)
MOST = 500  # folders that are listed


class Filters:
  """Of one generation of a collection; folders are found out when they are first asked for."""

  def __init__(self, collection):
    self._collection = collection
    self.sources = _labels(collection.sources)  # [S]: names for people, all different
    self._mask = functools.lru_cache(16)(self._make)

  @functools.cached_property
  def _folders(self):
    """int32 [N], list of str: the folder of each image."""
    found, rows = {}, np.empty(len(self._collection), np.int32)
    for row, (source, name) in enumerate(
      zip(self._collection.source_of.tolist(), self._collection.names, strict=True)
    ):
      folder = os.path.dirname(name)
      rows[row] = found.setdefault((source, folder), len(found))
    names = [
      os.fsencode(os.path.join(self.sources[source], folder)).decode("utf-8", "replace").rstrip("/")
      for source, folder in found
    ]
    return rows, names

  def folder(self, row) -> str:
    """The folder of an image, with its source."""
    rows, names = self._folders
    return names[rows[row]]

  def listed(self) -> list[dict]:
    """Sources and folders with the number of images in and under each, at most MOST."""
    rows, names = self._folders
    totals = {}
    for name, count in zip(names, np.bincount(rows, minlength=len(names)).tolist(), strict=True):
      parts = name.split("/")
      for end in range(1, len(parts) + 1):
        path = "/".join(parts[:end])
        totals[path] = totals.get(path, 0) + count
    known = sorted(totals, key=lambda path: (path.count("/"), path))[:MOST]
    return [{"folder": path, "images": totals[path]} for path in sorted(known)]

  @functools.cached_property
  def dates(self):
    """int64 [N]: nanoseconds since 1970; −1: not known."""
    dated = np.array([not source.has_captions for source in self._collection.sources])
    return np.where(dated[self._collection.source_of], self._collection.stamps[:, 1], -1)

  def span(self) -> list[str] | None:
    """The first and the last day on which an image was changed."""
    known = self.dates[self.dates >= 0]
    return [day(t) for t in (known.min(), known.max())] if len(known) else None

  def mask(self, folder="", since=None, until=None):
    """bool [N], or None for all; `since` and `until` are datetime.dates, both included."""
    return self._mask(folder, since, until) if folder or since or until else None

  def _make(self, folder, since, until):
    mask = np.ones(len(self._collection), bool)
    if folder:
      rows, names = self._folders
      inside = [name == folder or name.startswith(f"{folder.rstrip('/')}/") for name in names]
      if not any(inside):
        raise ValueError(f"folder: no image is in {folder!r}; /api/about lists folders")
      mask &= np.array(inside)[rows]
    days = self.dates // DAY
    if since:
      mask &= (days >= (since - EPOCH).days) & (days >= 0)
    if until:
      mask &= (days <= (until - EPOCH).days) & (days >= 0)
    return mask


def day(nanoseconds) -> str | None:
  """2026-11-18; None: not known."""
  if nanoseconds < 0:
    return None
  return (EPOCH + datetime.timedelta(days=int(nanoseconds) // DAY)).isoformat()


def _labels(sources):
  """photos, shapes/64:train; a second "photos" is "photos (2)"."""
  names = []
  for source in sources:
    name = f"{source.name}:{source.split}" if source.has_captions else source.path.name or "images"
    number = 1
    while (shown := f"{name} ({number})" if number > 1 else name) in names:
      number += 1
    names.append(shown)
  return names
