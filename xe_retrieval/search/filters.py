"""Which images of a collection are searched: of a source or folder, of certain dates, by a filter.

A folder is named as "photos/2019/june": the source, then the path in it. The date of an image is
when its file was last changed; images of data sets have none. Filters: see conditions.py.
"""

import datetime

from xe_retrieval.search import conditions
from xe_retrieval.search.conditions import DAY, EPOCH


def where(store, folder="", since=None, until=None, filter=""):
  """A condition, or None for all images; `since` and `until` are datetime.dates, both included."""
  inside = conditions.inside(folder) if folder else None
  if inside and not store.any_matches(inside):
    raise ValueError(f"folder: no image is in {folder!r}; /api/about lists folders")
  return conditions.all_of(
    inside,
    conditions.since(since) if since else None,
    conditions.until(until) if until else None,
    conditions.parse(filter, store.columns) if filter.strip() else None,
  )


def day(nanoseconds) -> str | None:
  """2026-11-18; None: not known."""
  if nanoseconds < 0:
    return None
  return (EPOCH + datetime.timedelta(days=int(nanoseconds) // DAY)).isoformat()
