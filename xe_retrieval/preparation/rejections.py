"""Why a row or an image is not in a prepared data set."""

from typing import NamedTuple

REASONS = (
  "missing file",
  "outside the folder",
  "not an image",
  "truncated",
  "over the pixel limit",
  "empty caption",
  "too long",
  "not UTF-8",
  "unreadable row",
  "duplicate",
  "contradiction",
)


class Rejected(Exception):
  """Raised by a failed check; `reason` is one of REASONS, `detail` the specifics."""

  def __init__(self, reason: str, detail: str = ""):
    assert reason in REASONS, reason
    super().__init__(reason, detail)
    self.reason, self.detail = reason, detail


class Rejection(NamedTuple):
  """One line of rejected.tsv."""

  where: str  # captions.tsv:17, or shard.tar:member
  image: str
  reason: str
  detail: str

  def __str__(self):
    detail = f" ({self.detail})" if self.detail else ""
    return f"{self.where}: {self.reason}: {self.image}{detail}"
