"""What a directory of embeddings says of itself: its plan, and which parts are done."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re

from etils import epath

from xe_retrieval.data import paths
from xe_retrieval.embed import leftovers, vector_files

FORMAT = 1
PLAN = "embedding.json"


@dataclasses.dataclass(frozen=True)
class Plan:
  """What all workers of a directory have to agree on."""

  model: str  # fingerprint
  source: str  # key, see image_sources
  parts: int
  width: int  # of a vector
  dimensions: int  # of the unit vector it begins with
  step: int | None  # of training, for people


def claim(out, plan: Plan) -> epath.Path:
  """Makes `out` a directory of this plan; ValueError if it is one of another."""
  out = paths.absolute(out)
  if not paths.is_remote(out):
    out.mkdir(parents=True, exist_ok=True)
  content = json.dumps({"format": FORMAT} | dataclasses.asdict(plan), indent=2) + "\n"
  if (out / PLAN).exists() or not paths.create(out / PLAN, content.encode()):
    held = read_plan(out)
    if held.source != plan.source:
      raise ValueError(f"{out} holds embeddings of {held.source!a}, not of {plan.source!a}")
    if held.parts != plan.parts:
      raise ValueError(f"{out} is divided into {held.parts} parts, not {plan.parts}")
    if held.model != plan.model:
      raise ValueError(
        f"{out} holds embeddings of another model (step {held.step}); take another --out"
      )
  return out


def is_one(path) -> bool:
  return (paths.given(path) / PLAN).exists()


def read_plan(out) -> Plan:
  path = paths.given(out) / PLAN
  try:
    content = json.loads(path.read_text())
    version = content.pop("format")
  except FileNotFoundError:
    raise ValueError(
      f"{out} holds no embeddings; python -m xe_retrieval.embed --workdir=… --images=… "
      f"--out={out} --part=1/4 makes a part of them"
    ) from None
  except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
    raise ValueError(f"{path} is damaged ({e})") from e
  if version != FORMAT:
    raise ValueError(f"{path} has format {version}, this version reads {FORMAT}: embed anew")
  try:
    return Plan(**content)
  except TypeError as e:
    raise ValueError(f"{path} is damaged ({e})") from e


def part_of(name: str, parts: int) -> int:
  """1 … parts, by the bytes of the name alone."""
  digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
  return int.from_bytes(digest) % parts + 1


def stem(part: int, parts: int) -> str:
  return f"{part:05d}-of-{parts:05d}"


def folder(out, part: int, parts: int) -> epath.Path:
  return epath.Path(out) / stem(part, parts)


@dataclasses.dataclass(frozen=True)
class Done:
  """What the marker of a part says."""

  part: int
  parts: int
  model: str
  source: str
  pictures: int
  skipped: int
  files: dict  # name -> [rows, bytes, CRC-32]
  skipped_file: str


def finish(out, plan: Plan, part: int, files, skipped) -> Done:
  """Writes the marker, if nobody else has meanwhile; `skipped` is [(entry, reason)]."""
  where, name = folder(out, part, plan.parts), ""
  if skipped:
    lines = [{"name": e.name, "reason": why, "stamp": e.stamp} for e, why in sorted(skipped)]
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    name = vector_files.list_name(content)
    paths.create(where / name, content)
  held = {file.name: [len(file.rows), file.size, file.crc] for file in files}
  pictures = sum(len(file.rows) for file in files)
  done = Done(part, plan.parts, plan.model, plan.source, pictures, len(skipped), held, name)
  content = json.dumps(dataclasses.asdict(done), indent=1) + "\n"
  if not paths.create(marker(out, part, plan.parts), content.encode()):
    done = read_done(out, plan, part)
    if done is None:
      raise ValueError(
        f"part {part}/{plan.parts} of {out} was changed by another worker: run the same again"
      )
  leftovers.delete_unlisted(where, {*done.files, done.skipped_file})
  return done


def read_files(out, plan: Plan, done: Done):
  """Yields (vector_files.File, pyarrow.Table) of a part, one at a time."""
  where, kind = folder(out, done.part, done.parts), vector_files.schema(plan.width)
  for name, (_, _, crc) in done.files.items():
    yield vector_files.read(where, name, kind, crc)


def read_skipped(out, done: Done) -> list[dict]:
  """[{"name", "reason", "stamp"}]"""
  if not done.skipped_file:
    return []
  path = folder(out, done.part, done.parts) / done.skipped_file
  try:
    content = path.read_bytes()
    if vector_files.list_name(content) != path.name:
      raise ValueError("its name is the hash of another list")
    lines = [json.loads(line) for line in content.splitlines()]
    return [{key: line[key] for key in ("name", "reason", "stamp")} for line in lines]
  except FileNotFoundError:
    raise ValueError(f"{path} is missing; {vector_files.AGAIN}") from None
  except (ValueError, KeyError, TypeError) as e:
    raise ValueError(f"{path} is damaged ({e}); {vector_files.AGAIN}") from e


def marker(out, part: int, parts: int) -> epath.Path:
  return epath.Path(out) / f"{stem(part, parts)}.json"


def read_marker(out, part: int, parts: int) -> bytes | None:
  try:
    return marker(out, part, parts).read_bytes()
  except FileNotFoundError:
    return None


def withdraw(out, part: int, parts: int, held: bytes) -> bool:
  """Deletes the marker of a part that says `held`; False: another worker has written a newer one.

  It is moved away before it is compared, as no file system deletes what has certain contents; in a
  bucket, the newer one may come between the two.
  """
  path = marker(out, part, parts)
  aside = path if paths.is_remote(path) else paths.own_part(path)
  try:
    if aside != path:
      os.rename(path, aside)
    same = aside.read_bytes() == held
  except FileNotFoundError:  # another worker has withdrawn it
    return True
  if not same and aside != path:
    with contextlib.suppress(FileExistsError):
      os.link(aside, path)
  if same or aside != path:
    aside.unlink(missing_ok=True)
  return same


def read_done(out, plan: Plan, part: int) -> Done | None:
  """None if the part is not done; ValueError if its marker is damaged or of another plan.

  OSError if the disk fails, here and in `read_skipped`: that is no damage, nothing may be deleted.
  """
  path = marker(out, part, plan.parts)
  try:
    done = Done(**json.loads(path.read_text()))
    rows = sum(rows for rows, _, _ in done.files.values())
  except FileNotFoundError:
    return None
  except (ValueError, TypeError, AttributeError) as e:
    raise ValueError(f"{path} is damaged ({e}); {vector_files.AGAIN}") from e
  about = done.part, done.parts, done.model, done.source, done.pictures
  if about != (part, plan.parts, plan.model, plan.source, rows):
    raise ValueError(f"{path} does not belong to {PLAN} beside it; {vector_files.AGAIN}")
  return done


@dataclasses.dataclass(frozen=True)
class Status:
  plan: Plan
  done: int
  pictures: int
  skipped: int
  missing: list[int]  # parts
  damaged: dict[int, str]  # a sentence each


def status(out) -> Status:
  """Reads every marker, and the sizes of the files they name."""
  out, plan = paths.given(out), read_plan(out)
  there = {path.name for path in out.iterdir()}
  done, pictures, skipped, missing, damaged = 0, 0, 0, [], {}
  for part in range(1, plan.parts + 1):
    if marker(out, part, plan.parts).name not in there:
      missing.append(part)
      continue
    try:
      found = read_done(out, plan, part)
      check_sizes(out, found)
    except ValueError as e:
      damaged[part] = str(e)
      continue
    done, pictures, skipped = done + 1, pictures + found.pictures, skipped + found.skipped
  return Status(plan, done, pictures, skipped, missing, damaged)


def check_sizes(out, done: Done) -> None:
  where = folder(out, done.part, done.parts)
  for name, (_, size, _) in done.files.items():
    try:
      found = (where / name).stat().length
    except FileNotFoundError:
      raise ValueError(f"{where / name} is missing; {vector_files.AGAIN}") from None
    if found != size:
      raise ValueError(
        f"{where / name} has {found:,} bytes instead of {size:,}; {vector_files.AGAIN}"
      )
  read_skipped(out, done)


def spans(numbers: list[int]) -> str:
  """[1, 2, 3, 7] -> "1-3,7", as sbatch --array takes it."""
  found = []
  for n in numbers:
    if found and found[-1][1] == n - 1:
      found[-1][1] = n
    else:
      found.append([n, n])
  return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def parse_part(text: str) -> tuple[list[int], int]:
  """I/N -> [I], N; all/N -> [1, …, N], N."""
  found = re.fullmatch(r"(\d+|all)/(\d+)", text)
  parts = int(found[2]) if found else 0
  if not 1 <= parts <= 99_999 or not (found[1] == "all" or 1 <= int(found[1]) <= parts):
    raise ValueError(f"--part={text} should be like 1/4 … 4/4, or all/4")
  return list(range(1, parts + 1)) if found[1] == "all" else [int(found[1])], parts
