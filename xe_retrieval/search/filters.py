"""Which images of a collection are searched: those of a source or folder, those of certain dates.

A folder is named as "photos/2019/june": the source, then the path in it. The date of an image is
when its file was last changed; images of data sets have none.
"""

import dataclasses
import datetime

import numpy as np

DAY = 86_400 * 10**9  # nanoseconds
EPOCH = datetime.date(1970, 1, 1)


@dataclasses.dataclass(frozen=True)
class InFolder:
  folder: str

  def mask(self, table):  # a pyarrow table of N rows -> bool [N]
    column = table["folder"].combine_chunks()
    inside = f"{self.folder.rstrip('/')}/"
    names = column.dictionary.to_pylist()
    matching = np.array([name == self.folder or name.startswith(inside) for name in names], bool)
    return matching[column.indices.to_numpy(zero_copy_only=False)]


@dataclasses.dataclass(frozen=True)
class Dated:
  since: datetime.date | None
  until: datetime.date | None

  def mask(self, table):
    days = table["date"].to_numpy() // DAY
    since = (self.since - EPOCH).days if self.since else 0
    until = (self.until - EPOCH).days if self.until else np.iinfo(np.int64).max
    return (days >= max(since, 0)) & (days <= until)


@dataclasses.dataclass(frozen=True)
class Both:
  one: InFolder
  other: Dated

  def mask(self, table):
    return self.one.mask(table) & self.other.mask(table)


def where(store, folder="", since=None, until=None):
  """A condition, or None for all images; `since` and `until` are datetime.dates, both included."""
  inside = InFolder(folder) if folder else None
  if inside and not store.matching(inside):
    raise ValueError(f"folder: no image is in {folder!r}; /api/about lists folders")
  dated = Dated(since, until) if since or until else None
  return Both(inside, dated) if inside and dated else inside or dated


def day(nanoseconds) -> str | None:
  """2026-11-18; None: not known."""
  if nanoseconds < 0:
    return None
  return (EPOCH + datetime.timedelta(days=int(nanoseconds) // DAY)).isoformat()
